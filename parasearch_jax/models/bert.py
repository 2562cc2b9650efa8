"""The BERT encoder: Flax NNX modules, a pure forward pass, weights in Hugging Face layout.

Axes: B batch, T query, S key, N heads, H head dim, D model, F ffn, V vocab, P positions, Y token types, L layers.

Parameters are a nested dict of fp32 arrays, cast to the compute dtype where they are used:

    {"embed": {"word": [V,D], "position": [P,D], "type": [Y,D]}, "embed_norm": NORM, "layers": {... leaves [L, ...]}}

    a layer   {"attn": {"q", "k", "v": [D,N,H], "q_bias", "k_bias", "v_bias": [N,H], "o": [N,H,D], "o_bias": [D]},
               "attn_norm": NORM,
               "mlp": {"up": [D,F], "up_bias": [F], "down": [F,D], "down_bias": [D]},
               "mlp_norm": NORM}
    NORM      {"scale": [D], "bias": [D]}

Sums between the products, norms and softmax are fp32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parasearch_jax.errors import UserError
from parasearch_jax.models.attention import MASKED, product
from parasearch_jax.models.decoder import Params, fresh, graph_of, normal, required
from parasearch_jax.models.weights import assemble, open_tensors, parameters_of

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Shape of a BERT encoder. `dtype` is the compute dtype; parameters are fp32 whatever it says."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> BertConfig:
        """From a Hugging Face config.json. Raises UserError naming the field for what this encoder does not compute."""
        _check_supported(hf)
        if dtype not in DTYPES:
            raise UserError(f"The encoder's dtype is {dtype!r}; use {' or '.join(map(repr, DTYPES))}.")
        return cls(
            vocab_size=required(hf, "vocab_size"),
            hidden_size=required(hf, "hidden_size"),
            num_layers=required(hf, "num_hidden_layers"),
            num_heads=required(hf, "num_attention_heads"),
            intermediate_size=required(hf, "intermediate_size"),
            max_positions=required(hf, "max_position_embeddings"),
            type_vocab_size=hf.get("type_vocab_size", 2),
            layer_norm_eps=float(hf.get("layer_norm_eps", 1e-12)),
            dtype=dtype,
        )


def _check_supported(hf: Mapping[str, Any]) -> None:
    supported = {
        "model_type": "bert",
        "hidden_act": "gelu",  # by erf; "gelu_new" is the tanh approximation
        "position_embedding_type": "absolute",
        "is_decoder": False,
    }
    for field, value in supported.items():
        found = hf.get(field, None if field == "model_type" else value)
        if found != value:
            raise UserError(f"The encoder's config.json has {field} {found!r}; supported: {value!r}. "
                            "Take another model.")  # fmt: skip
    if required(hf, "hidden_size") % required(hf, "num_attention_heads"):
        raise UserError(f"The encoder's config.json has hidden_size {hf['hidden_size']}, no multiple of its "
                        f"num_attention_heads {hf['num_attention_heads']}. Take the one of the weights.")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- modules


class LayerNorm(nnx.Module):
    """y = (x - mean) / sqrt(var + eps) * scale + bias over D, in fp32; gives fp32."""

    def __init__(self, cfg: BertConfig):
        self.scale, self.bias = nnx.Param(jnp.ones(cfg.hidden_size)), nnx.Param(jnp.zeros(cfg.hidden_size))
        self.eps = cfg.layer_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x - x.mean(axis=-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self.scale[...] + self.bias[...]


def _zeros(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape))


class Attention(nnx.Module):
    """Every token attends to all tokens of its text."""

    def __init__(self, cfg: BertConfig, rngs: nnx.Rngs):
        D, N, H = cfg.hidden_size, cfg.num_heads, cfg.head_dim
        self.q, self.k, self.v = (normal(rngs, D, N, H) for _ in "qkv")
        self.q_bias, self.k_bias, self.v_bias = (_zeros(N, H) for _ in "qkv")
        self.o, self.o_bias = normal(rngs, N, H, D), _zeros(D)

    def _project(self, x: jax.Array, name: str) -> jax.Array:
        weight, bias = getattr(self, name)[...], getattr(self, f"{name}_bias")[...]
        return jnp.einsum("btd,dnh->btnh", x, weight.astype(x.dtype)) + bias.astype(x.dtype)

    def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
        # [B,N,T,H]: on a CPU these products take a fifth of the time of einsums over [B,T,N,H].
        q, k, v = (self._project(x, name).swapaxes(1, 2) for name in "qkv")
        scores = product(q, k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        out = product(weights.astype(x.dtype), v) / weights.sum(axis=-1, keepdims=True)
        out = out.astype(x.dtype).swapaxes(1, 2)
        return jnp.einsum("btnh,nhd->btd", out, self.o[...].astype(x.dtype)) + self.o_bias[...].astype(x.dtype)


class MLP(nnx.Module):
    """down(gelu(up x)), the exact GELU."""

    def __init__(self, cfg: BertConfig, rngs: nnx.Rngs):
        D, F = cfg.hidden_size, cfg.intermediate_size
        self.up, self.up_bias = normal(rngs, D, F), _zeros(F)
        self.down, self.down_bias = normal(rngs, F, D), _zeros(D)

    def __call__(self, x: jax.Array) -> jax.Array:
        up, up_bias, down, down_bias = (
            p[...].astype(x.dtype) for p in (self.up, self.up_bias, self.down, self.down_bias)
        )
        return _gelu(x @ up + up_bias) @ down + down_bias


def _gelu(x: jax.Array) -> jax.Array:
    """The exact one. By erf, which takes a third of the time of erfc, as jax.nn.gelu has it for its far left tail."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


class Layer(nnx.Module):
    """Attention and MLP, each normalised after its sum with the input. x is fp32 between the products."""

    def __init__(self, cfg: BertConfig, rngs: nnx.Rngs):
        self.attn, self.attn_norm = Attention(cfg, rngs), LayerNorm(cfg)
        self.mlp, self.mlp_norm = MLP(cfg, rngs), LayerNorm(cfg)
        self.dtype = cfg.dtype

    def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
        x = self.attn_norm(x + self.attn(x.astype(self.dtype), seen))
        return self.mlp_norm(x + self.mlp(x.astype(self.dtype)))


class Embedding(nnx.Module):
    """Word + position + token type 0, normalised."""

    def __init__(self, cfg: BertConfig, rngs: nnx.Rngs):
        sizes = {"word": cfg.vocab_size, "position": cfg.max_positions, "type": cfg.type_vocab_size}
        self.embed = nnx.Dict({name: normal(rngs, size, cfg.hidden_size) for name, size in sizes.items()})
        self.embed_norm = LayerNorm(cfg)

    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = self.embed
        return self.embed_norm(embed["word"][...][ids] + embed["position"][...][: ids.shape[1]] + embed["type"][...][0])


# --------------------------------------------------------------------------------------------------- pure functions


def init(cfg: BertConfig, key: jax.Array) -> Params:
    """Parameters: matrices normal(0, 0.02), norms 1, biases 0; fp32."""
    outer, inner = jax.random.split(key)
    layers = jax.vmap(lambda k: fresh(Layer, cfg, k))(jax.random.split(inner, cfg.num_layers))
    return {**fresh(Embedding, cfg, outer), "layers": layers}


def param_shapes(cfg: BertConfig) -> Params:
    """The parameters as jax.ShapeDtypeStructs, without computing anything."""
    return jax.eval_shape(functools.partial(init, cfg), jax.random.key(0))


def forward(params: Params, cfg: BertConfig, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Last hidden states fp32 [B,T,D] of right-padded rows: ids int32 [B,T], lengths int32 [B]. What stands right of a
    length changes nothing left of it, and a row of length 0 is finite."""
    graph, seen = graph_of(Layer, cfg), jnp.arange(ids.shape[1]) < lengths[:, None]
    outer = {name: leaf for name, leaf in params.items() if name != "layers"}

    def step(x, layer):
        return nnx.merge(graph, layer)(x, seen), None

    return jax.lax.scan(step, nnx.merge(graph_of(Embedding, cfg), outer)(ids), params["layers"])[0]


# ---------------------------------------------------------------------------------------------------------- weights

# Path in our tree -> (Hugging Face name, kind), as in weights.py.
_OUTER = {
    ("embed", "word"): ("embeddings.word_embeddings.weight", None),
    ("embed", "position"): ("embeddings.position_embeddings.weight", None),
    ("embed", "type"): ("embeddings.token_type_embeddings.weight", None),
    ("embed_norm", "scale"): ("embeddings.LayerNorm.weight", 0),
    ("embed_norm", "bias"): ("embeddings.LayerNorm.bias", 0),
}
_LAYER = {
    ("attn", "q"): ("attention.self.query.weight", 1),
    ("attn", "k"): ("attention.self.key.weight", 1),
    ("attn", "v"): ("attention.self.value.weight", 1),
    ("attn", "o"): ("attention.output.dense.weight", 2),
    ("attn", "q_bias"): ("attention.self.query.bias", 0),
    ("attn", "k_bias"): ("attention.self.key.bias", 0),
    ("attn", "v_bias"): ("attention.self.value.bias", 0),
    ("attn", "o_bias"): ("attention.output.dense.bias", 0),
    ("attn_norm", "scale"): ("attention.output.LayerNorm.weight", 0),
    ("attn_norm", "bias"): ("attention.output.LayerNorm.bias", 0),
    ("mlp", "up"): ("intermediate.dense.weight", 1),
    ("mlp", "up_bias"): ("intermediate.dense.bias", 0),
    ("mlp", "down"): ("output.dense.weight", 1),
    ("mlp", "down_bias"): ("output.dense.bias", 0),
    ("mlp_norm", "scale"): ("output.LayerNorm.weight", 0),
    ("mlp_norm", "bias"): ("output.LayerNorm.bias", 0),
}


def load_params(directory: str | os.PathLike, cfg: BertConfig) -> Params:
    """model.safetensors (or its shards), tensor names with or without "bert." -> parameters, fp32 jax arrays.

    Raises UserError naming the tensors that are missing, left over, or of another shape than cfg says.
    """
    directory, shapes = Path(directory), param_shapes(cfg)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(directory, stack)
        prefix = "bert." if any(name.startswith("bert.") for name in tensors) else ""
        tensors = {name: tensor for name, tensor in tensors.items() if not _unused(name.removeprefix(prefix))}
        outer = {path: (prefix + name, kind) for path, (name, kind) in _OUTER.items()}
        parameters = parameters_of(shapes, outer, _LAYER, prefix + "encoder.layer.{}.")
        return assemble(tensors, shapes, parameters, str(directory), f"model_type bert, {cfg.num_layers} layers")


def _unused(name: str) -> bool:
    """Neither mean nor CLS pooling goes through BERT's pooler; position ids are 0, 1, 2 and so on."""
    return name.startswith("pooler.") or name == "embeddings.position_ids"
