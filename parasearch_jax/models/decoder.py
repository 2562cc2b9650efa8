"""The Qwen2 decoder (and Llama without RoPE scaling): Flax NNX modules, pure functions around them.

Axes: B batch, T query, N heads, K kv-heads, H head dim, D model, F ffn, V vocab, L layers.

Parameters are a nested dict of fp32 arrays in one of two layouts:

    trainer   {"embed": [V,D], "layers": {... leaves [L, ...]}, "norm": {"scale": [D]}, "head": [D,V]}   `forward`
    sampler   the same, "layers" a tuple of L dicts (see sharding/layout.py)                             `forward_layers`

    a layer   {"attn_norm": {"scale": [D]}, "attn": {"q": [D,N,H], "k", "v": [D,K,H], "o": [N,H,D], "q_bias": [N,H], "k_bias", "v_bias": [K,H]},
               "mlp_norm": {"scale": [D]}, "mlp": {"gate", "up": [D,F], "down": [F,D]}}

"head" is absent when the embedding is tied, the biases where the model has none. Matrices are cast to the compute dtype
where they are used; norms, RoPE, softmax and logits are fp32.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parasearch_jax.errors import UserError
from parasearch_jax.models.attention import causal_attention

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q [B,T,N,H], k, v [B,T,K,H] -> [B,T,N,H]

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
_INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. `dtype` is the compute dtype; parameters are fp32 masters whatever it says."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = True
    max_position_embeddings: int = 32768
    model_type: str = "qwen2"
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> DecoderConfig:
        """From a Hugging Face config.json, of transformers 4 (`rope_theta`) or 5 (`rope_parameters`).

        Raises UserError naming the field for what this decoder does not compute.
        """
        _check_supported(hf)
        heads, eos = _required(hf, "num_attention_heads"), hf.get("eos_token_id")
        hidden = _required(hf, "hidden_size")
        return cls(
            vocab_size=_required(hf, "vocab_size"),
            hidden_size=hidden,
            num_layers=_required(hf, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            intermediate_size=_required(hf, "intermediate_size"),
            rope_theta=float(_rope(hf).get("rope_theta", 10000.0)),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=hf["model_type"] == "qwen2",
            max_position_embeddings=hf.get("max_position_embeddings", 32768),
            model_type=hf["model_type"],
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
            dtype=dtype,
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json. RoPE stands in both spellings: transformers 4, 5 and vLLM read it."""
        eos = list(self.eos_token_ids)
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "initializer_range": _INIT_STD,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }


def _required(hf: Mapping[str, Any], field: str) -> Any:
    if hf.get(field) is None:
        raise UserError(f"config.json of the model has no '{field}'. Take the config.json that belongs to the weights.")
    return hf[field]


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as the new one: {"rope_theta": f, "rope_type": str, ...}."""
    old = {key: hf[key] for key in ("rope_theta",) if hf.get(key) is not None}
    return old | dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})


def _check_supported(hf: Mapping[str, Any]) -> None:
    rope = _rope(hf)
    found = {
        "model_type": (hf.get("model_type"), tuple(_ARCHITECTURES)),
        "hidden_act": (hf.get("hidden_act", "silu"), ("silu",)),
        "rope type": (rope.get("rope_type", rope.get("type", "default")), ("default",)),
        "use_sliding_window": (bool(hf.get("use_sliding_window", False)), (False,)),
        "attention_bias": (hf.get("model_type") == "llama" and bool(hf.get("attention_bias", False)), (False,)),
        "mlp_bias": (bool(hf.get("mlp_bias", False)), (False,)),
    }
    for field, (value, supported) in found.items():
        if value not in supported:
            names = ", ".join(map(repr, supported))
            raise UserError(f"The model's config.json has {field} {value!r}; supported: {names}. Take another model.")


# ---------------------------------------------------------------------------------------------------------- modules


class RMSNorm(nnx.Module):
    """y = x / rms(x) * scale, in fp32, cast back to x's dtype."""

    def __init__(self, dim: int, eps: float):
        self.scale = nnx.Param(jnp.ones(dim))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...]).astype(x.dtype)


def _normal(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(_INIT_STD * jax.random.normal(rngs.params(), shape))


class Attention(nnx.Module):
    """Grouped-query attention with RoPE; bias (if any) on q, k, v, never on o."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        D, N, K, H = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.q, self.k, self.v = _normal(rngs, D, N, H), _normal(rngs, D, K, H), _normal(rngs, D, K, H)
        self.o = _normal(rngs, N, H, D)
        self.bias = cfg.qkv_bias
        if cfg.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = (nnx.Param(jnp.zeros((heads, H))) for heads in (N, K, K))

    def _project(self, x: jax.Array, name: str) -> jax.Array:
        y = jnp.einsum("btd,dnh->btnh", x, getattr(self, name)[...].astype(x.dtype))
        return y + getattr(self, f"{name}_bias")[...].astype(x.dtype) if self.bias else y

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        q, k, v = (self._project(x, name) for name in "qkv")
        out = attend(apply_rope(q, *rope), apply_rope(k, *rope), v)
        return jnp.einsum("btnh,nhd->btd", out, self.o[...].astype(x.dtype))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        D, F = cfg.hidden_size, cfg.intermediate_size
        self.gate, self.up, self.down = _normal(rngs, D, F), _normal(rngs, D, F), _normal(rngs, F, D)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        flat = x.reshape(-1, x.shape[-1])  # two axes: XLA on CPU fuses the backward pass better (41 ms against 62)
        return ((jax.nn.silu(flat @ gate) * (flat @ up)) @ down).reshape(x.shape)


class Layer(nnx.Module):
    """Pre-norm attention and MLP. How q, k, v become an output is the caller's: training attends causally, the sampler
    through its cache."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.attn = Attention(cfg, rngs)
        self.mlp_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg, rngs)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        x = x + self.attn(self.attn_norm(x), rope, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """What stands around the layers. The layers are data, not children: stacked for `forward`, a tuple for
    `forward_layers`; both hand in `run_layers(x, rope) -> x`."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = _normal(rngs, cfg.vocab_size, cfg.hidden_size)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.head = _normal(rngs, cfg.hidden_size, cfg.vocab_size)

    def __call__(self, ids: jax.Array, positions: jax.Array, run_layers: Callable) -> jax.Array:
        x = self.embed[...][ids].astype(self.cfg.dtype)
        return self.norm(run_layers(x, rope_tables(positions, self.cfg)))


# ------------------------------------------------------------------------------------------------------------- RoPE


def rope_frequencies(cfg: DecoderConfig) -> jax.Array:
    """fp32 [H/2], radians per position; the first is 1."""
    return cfg.rope_theta ** -(jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)


def rope_tables(positions: jax.Array, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """int32 [B,T] -> cos, sin, each fp32 [B,T,1,H/2]. Never from bf16 positions: 4095 would become 4096."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(cfg)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [B,T,N,H] in fp32; pairs are (i, i + H/2), as in Hugging Face's rotate_half."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


# --------------------------------------------------------------------------------------------------- pure functions


@functools.cache
def _graph(module: type[nnx.Module], cfg: DecoderConfig) -> nnx.GraphDef:
    """The static half of a module: split once, merged with arrays wherever it runs."""
    return nnx.split(nnx.eval_shape(lambda: module(cfg, nnx.Rngs(0))))[0]


def _fresh(module: type[nnx.Module], cfg: DecoderConfig, key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(module(cfg, nnx.Rngs(key))))


def init(cfg: DecoderConfig, key: jax.Array) -> Params:
    """Trainer parameters: matrices normal(0, 0.02), norms 1, biases 0; fp32. Runs under jit too."""
    outer, inner = jax.random.split(key)
    layers = jax.vmap(lambda k: _fresh(Layer, cfg, k))(jax.random.split(inner, cfg.num_layers))
    return {**_fresh(Decoder, cfg, outer), "layers": layers}


def param_shapes(cfg: DecoderConfig) -> Params:
    """The trainer layout as jax.ShapeDtypeStructs, without computing anything."""
    return jax.eval_shape(functools.partial(init, cfg), jax.random.key(0))


def _decoder(params: Params, cfg: DecoderConfig) -> Decoder:
    return nnx.merge(_graph(Decoder, cfg), {name: leaf for name, leaf in params.items() if name != "layers"})


def forward(params: Params, cfg: DecoderConfig, ids: jax.Array, positions: jax.Array, remat: bool = False) -> jax.Array:
    """Causal forward pass over trainer parameters, one scan over the layers.

    Args: ids, positions int32 [B,T], rows right-padded. `remat` keeps only each layer's input for the backward pass.
    Returns the hidden states after the final norm, [B,T,D] in cfg.dtype; `logits` makes logits of them.
    """
    graph = _graph(Layer, cfg)

    def run_layers(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        def step(x, layer):
            return nnx.merge(graph, layer)(x, rope, causal_attention), None

        # prevent_cse guards against an optimisation that cannot happen inside a scan, and costs fusion.
        step = jax.checkpoint(step, prevent_cse=False) if remat else step
        return jax.lax.scan(step, x, params["layers"])[0]

    return _decoder(params, cfg)(ids, positions, run_layers)


def forward_layers(
    params: Params,
    cfg: DecoderConfig,
    ids: jax.Array,
    positions: jax.Array,
    attend: Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Forward pass over sampler parameters, a Python loop over the layers.

    Args: ids, positions int32 [B,T]; `attend(layer_index, q, k, v) -> [B,T,N,H]` gets q [B,T,N,H] and the new k, v
    [B,T,K,H], both after RoPE; a cache is the business of its closure. Returns hidden [B,T,D] as `forward` does.
    """
    graph = _graph(Layer, cfg)

    def run_layers(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        for index, layer in enumerate(params["layers"]):
            x = nnx.merge(graph, layer)(x, rope, functools.partial(attend, index))
        return x

    return _decoder(params, cfg)(ids, positions, run_layers)


def head(params: Params, cfg: DecoderConfig) -> jax.Array:
    """The output matrix [D,V]: the transposed embedding when tied, else the model's own."""
    return params["embed"].T if cfg.tie_word_embeddings else params["head"]


def logits(params: Params, cfg: DecoderConfig, hidden: jax.Array) -> jax.Array:
    """hidden [..., D] -> fp32 [..., V]: product in the compute dtype, sums in fp32."""
    weight = head(params, cfg).astype(cfg.dtype)
    return jnp.einsum("...d,dv->...v", hidden, weight, preferred_element_type=jnp.float32)
