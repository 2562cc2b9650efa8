"""Models from disk: `load_model(path)`."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.models.weights import load_config, load_params

__all__ = ["Model", "load_model", "load_tokenizer"]


class Model:
    """A decoder with its tokenizer.

    config      DecoderConfig
    params      trainer layout (layers stacked on L), fp32
    tokenizer   a fast transformers tokenizer; read from `directory` when first asked for, so that weights without one
                (golden files, a bare checkpoint) can be scored by ids
    """

    def __init__(self, config: DecoderConfig, params: Params, tokenizer: Any = None, directory: Path | None = None):
        self.config, self.params, self.directory = config, params, directory
        if tokenizer is not None:
            self.tokenizer = tokenizer  # stands in front of the lazy one below

    @functools.cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

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
    """Loads a model directory in Hugging Face layout, or the `model/` of a work directory.

    `dtype` is the compute dtype; parameters are fp32. With a mesh they are replicated over it.
    Raises UserError naming the path, what is absent, and the fix.
    """
    directory = _model_directory(Path(path))
    config = load_config(directory, dtype)
    sharding = None if mesh is None else jax.NamedSharding(mesh, jax.P())
    return Model(config, jax.device_put(load_params(directory, config), sharding), directory=directory)


def _model_directory(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"model.path: {path} does not exist. Give a model directory or the work directory of a run.")
    if not path.is_dir():
        raise UserError(
            f"model.path: {path} is a file. Give the directory that holds config.json and model.safetensors."
        )
    # A work directory has a config.json too (the run's), so its model/ is looked for first.
    directory = path / "model" if (path / "model" / "config.json").exists() else path
    if not any((directory / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise UserError(f"model.path: {path} holds neither model.safetensors nor a finished run's model/. "
                        "Give a model directory, or wait for the run to finish.")  # fmt: skip
    return directory


def load_tokenizer(directory: Path | None) -> Any:
    """The fast tokenizer of a model directory; UserError naming the directory when it has none."""
    if directory is None or not (directory / "tokenizer.json").exists():
        raise UserError(f"No tokenizer.json in {directory}. Copy the one that belongs to the model there.")
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer: for model_type qwen2 it puts Qwen's own pre-tokenizer in place of the one in tokenizer.json.
    return PreTrainedTokenizerFast.from_pretrained(directory)
