"""Models from disk: `load_model(path)`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.models.encoder import load_encoder
from parasearch_jax.models.paths import resolve, restore_params
from parasearch_jax.models.weights import load_config, load_params
from parasearch_jax.sharding import rules

__all__ = ["Model", "load_encoder", "load_model", "load_tokenizer"]


class Model:
    """A decoder with its tokenizer.

    config      DecoderConfig
    params      trainer layout (layers stacked on L), fp32
    tokenizer   a fast transformers tokenizer; read when first asked for, so that weights without one (golden files, a
                bare checkpoint) can be scored by ids
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        tokenizer: Any = None,
        read_tokenizer: Callable[[], Any] = lambda: load_tokenizer(None),
    ):
        self.config, self.params, self._read_tokenizer = config, params, read_tokenizer
        if tokenizer is not None:
            self.tokenizer = tokenizer  # stands in front of the lazy one below

    @functools.cached_property
    def tokenizer(self) -> Any:
        return self._read_tokenizer()

    def logits(self, ids: Any, lengths: Any) -> jax.Array:
        """Next-token logits of right-padded rows.

        Args: ids int [B,T], lengths int [B]; what stands right of a length is ignored, whatever it is.
        Returns fp32 [B,T,V]; [b,t] speaks of token t + 1, and for t >= lengths[b] of nothing.
        Raises UserError for an id outside the vocabulary (an array lookup would clamp it silently).
        """
        ids, lengths = np.asarray(ids), np.asarray(lengths)
        ids = np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, 0).astype(np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            bad = ids.max() if ids.min() >= 0 else ids.min()
            raise UserError(f"Token id {bad} is outside the model's vocabulary of {self.config.vocab_size}. "
                            "Use the tokenizer that belongs to the model.")  # fmt: skip
        return _logits(self.params, self.config, ids)


@functools.partial(jax.jit, static_argnums=1)
def _logits(params: Params, cfg: DecoderConfig, ids: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return decoder.logits(params, cfg, decoder.forward(params, cfg, ids, positions))


def load_model(path: str | os.PathLike, mesh: jax.sharding.Mesh | None = None, dtype: str = "float32") -> Model:
    """Loads what `path` names: a model directory in Hugging Face layout, a .gguf file, the work directory of a run (its
    `model/`, else the policy of its last complete checkpoint), or a model on the Hugging Face hub (see paths.py).

    `dtype` is the compute dtype; parameters are fp32. With a mesh they are laid out on it by sharding/rules.py and only
    what this process's devices hold is read; without one they go to the default device.
    Raises UserError naming the path, what is absent, and the fix.
    """
    found = resolve(path)
    if found.is_gguf:
        from parasearch_jax.models import gguf  # the package behind it serves this format only

        file = gguf.open_gguf(found.base)
        config = gguf.read_config(file, dtype)
        read_params = functools.partial(gguf.load_params, file)
        read_tokenizer = functools.partial(gguf.read_tokenizer, file)
    else:
        config = dataclasses.replace(load_config(found.base, dtype), vocab_used=_tokenizer_size(found.base))
        read_params = functools.partial(load_params, found.base)
        read_tokenizer = functools.partial(load_tokenizer, found.base)
    if found.checkpoint is not None:
        read_params = functools.partial(restore_params, found.checkpoint)
    shardings = None if mesh is None else rules.shardings(decoder.param_shapes(config), mesh)
    return Model(config, read_params(config, shardings), read_tokenizer=read_tokenizer)


def _tokenizer_size(directory: Path) -> int | None:
    """Ids of the tokenizer that lies there, None without one."""
    if not (directory / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    return max(Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(True).values()) + 1


def load_tokenizer(directory: Path | None) -> Any:
    """The fast tokenizer of a model directory; UserError naming the directory when it has none."""
    if directory is None or not (directory / "tokenizer.json").exists():
        raise UserError(f"No tokenizer.json in {directory}. Copy the one that belongs to the model there.")
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer: for model_type qwen2 it puts Qwen's own pre-tokenizer in place of the one in tokenizer.json.
    return PreTrainedTokenizerFast.from_pretrained(directory)
