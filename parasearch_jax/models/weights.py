"""Decoder weights in Hugging Face layout: safetensors in and out.

Axes: N heads, K kv-heads, H head dim, D model, F ffn, V vocab, L layers.
Hugging Face stores a linear layer as [out, in] with heads flattened; we store [in, out] with heads as an axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from parasearch_jax import hosts
from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig, Params, param_shapes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9  # a larger model is written as several files
Index = tuple[slice, ...]

# Path in our tree -> (Hugging Face name, kind). The kind is the number of leading input axes of a matrix in our layout
# (D of [D,N,H]: 1; N and H of [N,H,D]: 2); 0 is a vector, flattened there; None is stored alike on both sides.
_OUTER = {
    ("embed",): ("model.embed_tokens.weight", None),
    ("norm", "scale"): ("model.norm.weight", 0),
    ("head",): ("lm_head.weight", None),
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


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A stored tensor, [out, in] or [out], of which nothing is read yet.

    `read` takes a slice for each axis and returns that part, in any dtype. Where `out` is heads, whole heads are asked
    for.
    """

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A leaf of a tree of parameters, and the tensors that hold it: one, or one a layer where the leaf is stacked."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]  # of one layer, in our layout
    kind: int | None  # as in _LAYER
    stacked: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.kind is None:
            return self.shape
        out = math.prod(self.shape[self.kind :])
        return (out, math.prod(self.shape[: self.kind])) if self.kind else (out,)


def parameters_of(shapes: Params, outer: Mapping, layer: Mapping, prefix: str) -> list[Parameter]:
    """The leaves of a tree of shapes, in the order of jax.tree.leaves; those under "layers" are stacked.

    `outer` and `layer` as the tables above; `prefix` names a layer's tensors, as in "model.layers.{}.".
    """
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        path = tuple(key.key for key in keys)
        if path[0] == "layers":
            name, kind = layer[path[1:]]
            names = tuple(prefix.format(i) + name for i in range(leaf.shape[0]))
            found.append(Parameter(path, names, leaf.shape[1:], kind, stacked=True))
        else:
            name, kind = outer[path]
            found.append(Parameter(path, (name,), leaf.shape, kind, stacked=False))
    return found


def _decoder_parameters(cfg: DecoderConfig) -> list[Parameter]:
    return parameters_of(param_shapes(cfg), _OUTER, _LAYER, "model.layers.{}.")


# ------------------------------------------------------------------------------------------------ from file to device


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


def load_params(directory: str | os.PathLike, cfg: DecoderConfig, shardings: Any = None) -> Params:
    """model.safetensors, or the shards of model.safetensors.index.json -> trainer parameters, fp32 jax arrays.

    `shardings`: None (the default device), one jax.sharding.Sharding for all, or a tree of them like the parameters.
    Raises UserError naming the tensors that are missing, left over, or of another shape than cfg says.
    """
    directory = Path(directory)
    with contextlib.ExitStack() as stack:
        return decoder_params(open_tensors(directory, stack), cfg, str(directory), shardings)


def decoder_params(tensors: Mapping[str, Tensor], cfg: DecoderConfig, where: str, shardings: Any = None) -> Params:
    """As `load_params`, from tensors under Hugging Face names; `where` is for errors."""
    tied, head, embedding = cfg.tie_word_embeddings, "lm_head.weight", "model.embed_tokens.weight"
    # Some exporters write the tied head out as well. A copy says nothing new; a head of its own must not be dropped.
    if tied and head in tensors and embedding in tensors and _same(tensors[head], tensors[embedding]):
        tensors = {name: tensor for name, tensor in tensors.items() if name != head}
    fits = f"model_type {cfg.model_type}, {cfg.num_layers} layers, tie_word_embeddings {tied}"
    return assemble(tensors, param_shapes(cfg), _decoder_parameters(cfg), where, fits, shardings)


def assemble(
    tensors: Mapping[str, Tensor],
    shapes: Params,
    parameters: list[Parameter],
    where: str,
    fits: str,
    shardings: Any = None,
) -> Params:
    """A tree like `shapes`, fp32, from the tensors that `parameters` name, each of them used once.

    Reads what this process's devices hold and no more, a shard at a time: host memory peaks at the largest shard of a
    parameter (all layers of it) and one tensor. `where` and `fits` (what the configuration says) are for errors.
    """
    _check_names(tensors, parameters, where, fits)
    _check_shapes(tensors, parameters, where)
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        placed = [shardings] * len(parameters)
    else:
        placed = jax.tree.leaves(jax.tree.map(lambda _, sharding: sharding, shapes, shardings))
    leaves = [
        _place(leaf.shape, sharding, functools.partial(_read_leaf, tensors, parameter))
        for leaf, sharding, parameter in zip(jax.tree.leaves(shapes), placed, parameters, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _check_names(tensors: Mapping[str, Tensor], parameters: list[Parameter], where: str, fits: str) -> None:
    wanted = {name for parameter in parameters for name in parameter.names}
    for what, names in (("lack", sorted(wanted - set(tensors))), ("have unexpected", sorted(set(tensors) - wanted))):
        if names:
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise UserError(f"The weights in {where} {what} tensors: {some}. They do not fit the model's configuration "
                            f"({fits}); take the files of one model.")  # fmt: skip


def _check_shapes(tensors: Mapping[str, Tensor], parameters: list[Parameter], where: str) -> None:
    for parameter in parameters:
        for name in parameter.names:
            found, expected = list(tensors[name].shape), list(parameter.stored_shape)
            if found != expected:
                raise UserError(
                    f"{where}: tensor '{name}' has shape {found}, the model's configuration asks for {expected}. Take "
                    "the configuration that belongs to the weights."
                )


def _same(a: Tensor, b: Tensor, rows: int = 8192) -> bool:
    """Whether two matrices are equal; by parts, as both in memory would be the peak of loading."""
    starts = range(0, a.shape[0], rows)
    parts = [(slice(start, min(start + rows, a.shape[0])), slice(None)) for start in starts]
    return a.shape == b.shape and all(np.array_equal(a.read(part), b.read(part)) for part in parts)


def _place(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, read: Callable[[Index], np.ndarray]
) -> jax.Array:
    """The array of `shape` whose parts `read(index)` gives; a part that several devices hold is read once.

    jax.make_array_from_callback would hold the parts of all devices on the host at once, and read replicas again.
    """
    if sharding is None:
        return _to_devices(read((slice(None),) * len(shape)), [None])[0]
    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in holders.items():
        shards += _to_devices(read(tuple(slice(*pair) for pair in bounds)), devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=np.float32)


def _to_devices(block: np.ndarray, devices: Sequence[jax.Device | None]) -> list[jax.Array]:
    """Waits for the copies, so that the block is freed before the next is read. (On CPU JAX may take it as it is.)"""
    return jax.block_until_ready([jax.device_put(block, device) for device in devices])


def _read_leaf(tensors: Mapping[str, Tensor], parameter: Parameter, index: Index) -> np.ndarray:
    """The part `index` of a leaf, fp32; of a stacked one, straight into its place."""
    if not parameter.stacked:
        return np.asarray(_read(tensors[parameter.names[0]], parameter, index), np.float32)
    names, (_, *rest) = parameter.names[index[0]], index
    sizes = [len(range(size)[part]) for size, part in zip(parameter.shape, rest, strict=True)]
    out = np.empty((len(names), *sizes), np.float32)
    for row, name in zip(out, names, strict=True):
        row[...] = _read(tensors[name], parameter, tuple(rest))
    return out


def _read(tensor: Tensor, parameter: Parameter, index: Index) -> np.ndarray:
    """The part `index` of a parameter in our layout, from a tensor in theirs.

    Axes that are flattened together there, such as N and H, are read whole but for the first of them.
    """
    shape, kind = parameter.shape, parameter.kind
    if kind is None:
        return tensor.read(index)
    out = _flat(shape[kind:], index[kind:])
    flat = tensor.read((out, _flat(shape[:kind], index[:kind]))).T if kind else tensor.read((out,))
    first = {0, kind}
    read = [len(range(size)[index[axis]]) if axis in first else size for axis, size in enumerate(shape)]
    return flat.reshape(read)[tuple(slice(None) if axis in first else part for axis, part in enumerate(index))]


def _flat(shape: tuple[int, ...], index: Index) -> slice:
    """Where the part of the first axis lies when the axes are flattened: heads 2..4 of [6,8] -> 16..32."""
    start, stop, _ = index[0].indices(shape[0])
    inner = math.prod(shape[1:])
    return slice(start * inner, stop * inner)


# ---------------------------------------------------------------------------------------------------- safetensors files


def open_tensors(directory: Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """Every tensor of a model directory, by name; the files stay open until `stack` closes them."""
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        for name, tensor in _open_file(file, stack):
            if name in tensors:
                raise UserError(f"{directory}: tensor '{name}' stands in two files. Take the files of one model.")
            tensors[name] = tensor
    return tensors


def _open_file(file: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, Tensor]]:
    try:
        handle = stack.enter_context(safe_open(file, framework="numpy"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}). Download or export it again.") from None
    for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
        view = handle.get_slice(name)
        yield name, Tensor(tuple(view.get_shape()), view.__getitem__)


def weight_names(directory: Path) -> list[str]:
    """The names of the safetensors files that a model directory has, or by its index should have."""
    index = directory / INDEX
    return sorted(set(read_json(index)["weight_map"].values())) if index.exists() else [WEIGHTS]


def _weight_files(directory: Path) -> list[Path]:
    files = [directory / name for name in weight_names(directory)]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise UserError(f"{directory} lacks {', '.join(absent)}. Give a directory with the model's safetensors files.")
    return files


# ------------------------------------------------------------------------------------------------------------- saving


def save_model(
    directory: str | os.PathLike,
    cfg: DecoderConfig,
    params: Params,
    tokenizer: Any,
    dtype: str = "float32",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes config.json, the weights (in `dtype`: "float32" or "bfloat16") and the tokenizer, in Hugging Face layout.

    `params`: trainer layout. `tokenizer`: a transformers tokenizer, or None to write none. Weights above `file_bytes`
    go to several files with an index; the host holds one file at a time. What an earlier export left is replaced;
    config.json comes last, so a directory that has one is complete. With several hosts all call it; the first writes.
    """
    numpy_dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}.get(dtype)
    if numpy_dtype is None:
        raise UserError(f"save_model: dtype is {dtype!r}; use 'float32' or 'bfloat16'.")
    directory, writes = Path(directory), hosts.is_first()
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        for old in (*directory.glob("config.json"), *directory.glob("model*.safetensors*")):
            old.unlink()
    _save_weights(directory, cfg, params, np.dtype(numpy_dtype), file_bytes, writes)
    if writes:
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        config = {**cfg.to_hf(), "dtype": dtype, "torch_dtype": dtype}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _save_weights(
    directory: Path, cfg: DecoderConfig, params: Params, dtype: np.dtype, file_bytes: int, writes: bool
) -> None:
    files = _split(_decoder_parameters(cfg), dtype.itemsize, file_bytes)
    count = len(files)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] if count > 1 else [WEIGHTS]
    for file, part in zip(names, files, strict=True):
        tensors = {}
        for name, parameter, layer in part:
            tensor = _stored(params, parameter, layer, dtype)  # on all hosts, as each has a part of it
            if writes:
                tensors[name] = tensor
        if writes:
            # transformers refuses a file that does not say which framework's layout it holds.
            save_file(tensors, directory / file, metadata={"format": "pt"})
    if writes and count > 1:
        weight_map = {name: file for file, part in zip(names, files, strict=True) for name, *_ in part}
        total = sum(math.prod(parameter.stored_shape) for part in files for _, parameter, _ in part) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(
    parameters: list[Parameter], itemsize: int, file_bytes: int
) -> list[list[tuple[str, Parameter, int | None]]]:
    """The tensors of each file: (name, parameter, layer). A file holds at least one, else at most `file_bytes`."""
    files, room = [], 0
    for parameter in parameters:
        size = math.prod(parameter.stored_shape) * itemsize
        for layer, name in enumerate(parameter.names):
            if not files or size > room:
                files.append([])
                room = file_bytes
            files[-1].append((name, parameter, layer if parameter.stacked else None))
            room -= size
    return files


def _stored(params: Params, parameter: Parameter, layer: int | None, dtype: np.dtype) -> np.ndarray:
    """One tensor as it is stored, fetched from its devices."""
    array = _leaf(params, parameter.path)
    array = hosts.fetch(array if layer is None else array[layer])
    if parameter.kind is not None:
        array = array.reshape(parameter.stored_shape[::-1]).T
    return np.ascontiguousarray(array, dtype)


def _leaf(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
