"""Decoder weights in Hugging Face layout: safetensors in and out.

Axes: N heads, K kv-heads, H head dim, D model, F ffn, V vocab, L layers.
Hugging Face stores a linear layer as [out, in] with heads flattened; we store [in, out] with heads as an axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig, Params, param_shapes

# Path in our tree -> (Hugging Face name, kind). The kind is the number of leading input axes of a matrix in our layout
# (D of [D,N,H]: 1; N and H of [N,H,D]: 2); 0 is a vector, flattened there; None is stored alike on both sides.
_OUTER = {
    ("embed",): ("model.embed_tokens.weight", None),
    ("norm", "scale"): ("model.norm.weight", 0),
    ("head",): ("lm_head.weight", 1),
}
_LAYER = {
    ("attn_norm", "scale"): ("input_layernorm.weight", 0),
    ("attn", "q"): ("self_attn.q_proj.weight", 1),
    ("attn", "k"): ("self_attn.k_proj.weight", 1),
    ("attn", "v"): ("self_attn.v_proj.weight", 1),
    ("attn", "o"): ("self_attn.o_proj.weight", 2),
    ("attn", "q_bias"): ("self_attn.q_proj.bias", 0),
    ("attn", "k_bias"): ("self_attn.k_proj.bias", 0),
    ("attn", "v_bias"): ("self_attn.v_proj.bias", 0),
    ("mlp_norm", "scale"): ("post_attention_layernorm.weight", 0),
    ("mlp", "gate"): ("mlp.gate_proj.weight", 1),
    ("mlp", "up"): ("mlp.up_proj.weight", 1),
    ("mlp", "down"): ("mlp.down_proj.weight", 1),
}


def _hf_shape(shape: tuple[int, ...], kind: int | None) -> tuple[int, ...]:
    if kind is None:
        return shape
    out = math.prod(shape[kind:])
    return (out, math.prod(shape[:kind])) if kind else (out,)


def _tensors(cfg: DecoderConfig) -> dict[str, tuple[tuple[str, ...], int | None, tuple[int, ...], int | None]]:
    """Every tensor of the model: Hugging Face name -> (path in our tree, layer or None, our shape without L, kind)."""
    table = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(param_shapes(cfg))[0]:
        path = tuple(key.key for key in keys)
        if path[0] != "layers":
            name, kind = _OUTER[path]
            table[name] = (path, None, leaf.shape, kind)
            continue
        name, kind = _LAYER[path[1:]]
        table |= {f"model.layers.{i}.{name}": (path, i, leaf.shape[1:], kind) for i in range(cfg.num_layers)}
    return table


def _leaf(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


# ---------------------------------------------------------------------------------------------------------- loading


def load_config(directory: str | os.PathLike, dtype: str = "float32") -> DecoderConfig:
    """Reads config.json, and the end tokens that only generation_config.json lists (Qwen2.5-Instruct)."""
    directory = Path(directory)
    hf = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    cfg = DecoderConfig.from_hf(hf, dtype)
    if generation.exists():
        more = DecoderConfig.from_hf({**hf, "eos_token_id": read_json(generation).get("eos_token_id")})
        cfg = dataclasses.replace(cfg, eos_token_ids=tuple(dict.fromkeys(cfg.eos_token_ids + more.eos_token_ids)))
    return cfg


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Give a model directory in Hugging Face layout.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Download or export the model again.") from None


def load_params(directory: str | os.PathLike, cfg: DecoderConfig) -> Params:
    """model.safetensors, or the shards of model.safetensors.index.json -> trainer parameters, fp32 numpy.

    Each tensor is read once, straight into its place, so that host memory is the parameters plus one tensor.
    Raises UserError naming the tensors that are missing, left over, or of another shape than cfg says.
    """
    directory, table = Path(directory), _tensors(cfg)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), param_shapes(cfg))
    with contextlib.ExitStack() as stack:
        slices = dict(_open(directory, stack))
        _check_names(directory, table, slices, cfg)
        for name, (path, layer, shape, kind) in table.items():
            tensor = slices[name]()
            if tensor.shape != _hf_shape(shape, kind):
                expected = list(_hf_shape(shape, kind))
                raise UserError(
                    f"{directory}: tensor '{name}' has shape {list(tensor.shape)}, config.json asks for {expected}. "
                    "Take the config.json that belongs to the weights."
                )
            target = _leaf(params, path)
            target[... if layer is None else layer] = (tensor if kind is None else tensor.T).reshape(shape)
    return params


def _open(directory: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """(tensor name, function that reads it) for every tensor of every file; nothing is read before it is asked for."""
    for file in _weight_files(directory):
        try:
            handle = stack.enter_context(safe_open(file, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read as safetensors ({error}). Download or export it again.") from None
        for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
            yield name, lambda handle=handle, name=name: handle.get_tensor(name)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        files = [directory / "model.safetensors"]
    else:
        files = [directory / file for file in sorted(set(read_json(index)["weight_map"].values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise UserError(f"{directory} lacks {', '.join(absent)}. Give a directory with the model's safetensors files.")
    return files


def _check_names(directory: Path, table: dict, slices: dict, cfg: DecoderConfig) -> None:
    extra = sorted(set(slices) - set(table))
    # Some exporters write the tied head out as well. A copy says nothing new; a head of its own must not be dropped.
    if cfg.tie_word_embeddings and extra == ["lm_head.weight"] and "model.embed_tokens.weight" in slices:
        extra = [] if np.array_equal(slices["lm_head.weight"](), slices["model.embed_tokens.weight"]()) else extra
    for what, names in (("lacks", sorted(set(table) - set(slices))), ("has unexpected", extra)):
        if names:
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise UserError(
                f"The weights in {directory} {what} tensors: {some}. They do not fit config.json (model_type "
                f"{cfg.model_type}, {cfg.num_layers} layers, tie_word_embeddings {cfg.tie_word_embeddings}); "
                "take the files of one model."
            )


# ----------------------------------------------------------------------------------------------------------- saving


def save_model(
    directory: str | os.PathLike, cfg: DecoderConfig, params: Params, tokenizer: Any, dtype: str = "float32"
):
    """Writes config.json, model.safetensors (in `dtype`: "float32" or "bfloat16") and the tokenizer, in Hugging Face
    layout. `params`: trainer layout. `tokenizer`: a transformers tokenizer, or None to write none."""
    numpy_dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}.get(dtype)
    if numpy_dtype is None:
        raise UserError(f"save_model: dtype is {dtype!r}; use 'float32' or 'bfloat16'.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    host, tensors = jax.device_get(params), {}
    for name, (path, layer, shape, kind) in _tensors(cfg).items():
        array = _leaf(host, path)[... if layer is None else layer]
        flat = array if kind is None else array.reshape(_hf_shape(shape, kind)[::-1]).T
        tensors[name] = np.ascontiguousarray(flat, numpy_dtype)
    # transformers refuses a file that does not say which framework's layout it holds.
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**cfg.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
