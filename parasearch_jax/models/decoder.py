"""The decoder of Qwen2, Qwen2.5 and Llama 3: Flax NNX modules, pure functions around them.

Axes: B batch, T query, N heads, K kv-heads, H head dim, D model, F ffn, V vocab, L layers.

Parameters are a nested dict of fp32 arrays in one of two layouts:

    trainer   {"embed": [V,D], "layers": {... leaves [L, ...]}, "norm": {"scale": [D]}, "head": [V,D]}   `forward`
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
from parasearch_jax.sharding import layout, rules

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q [B,T,N,H], k, v [B,T,K,H] -> [B,T,N,H]

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
_INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of RoPE: wavelengths beyond the old context grow by `factor`, short ones stay."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder, and how it computes: `dtype` of the products (parameters are fp32 masters whatever it says),
    `attention` of whole sequences (see attention.py), and `vocab_used`, the tokenizer's size: rows of the vocabulary
    past it (Qwen2.5 pads 151,665 to 152,064) are never sampled and take no probability; None: all are used."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = True
    max_position_embeddings: int = 32768
    model_type: str = "qwen2"
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    attention: str = "auto"
    vocab_used: int | None = None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> DecoderConfig:
        """From a Hugging Face config.json, of transformers 4 (`rope_theta`) or 5 (`rope_parameters`).

        Raises UserError naming the field for what this decoder does not compute.
        """
        _check_supported(hf)
        heads, eos = required(hf, "num_attention_heads"), hf.get("eos_token_id")
        hidden = required(hf, "hidden_size")
        return cls(
            vocab_size=required(hf, "vocab_size"),
            hidden_size=hidden,
            num_layers=required(hf, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            intermediate_size=required(hf, "intermediate_size"),
            rope_theta=float(_rope(hf).get("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(_rope(hf)),
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
        eos, rope = list(self.eos_token_ids), {"rope_type": "default"}
        if self.rope_scaling:
            rope = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
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
            "rope_scaling": rope if self.rope_scaling else None,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
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


def required(hf: Mapping[str, Any], field: str) -> Any:
    if hf.get(field) is None:
        raise UserError(f"config.json of the model has no '{field}'. Take the config.json that belongs to the weights.")
    return hf[field]


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as the new one: {"rope_theta": f, "rope_type": str, ...}."""
    old = {key: hf[key] for key in ("rope_theta",) if hf.get(key) is not None}
    return old | dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if _rope_type(rope) == "default":
        return None
    missing = [field.name for field in dataclasses.fields(RopeScaling) if rope.get(field.name) is None]
    if missing:
        raise UserError(f"config.json of the model: its llama3 RoPE scaling lacks {', '.join(missing)}. Take the "
                        "config.json that belongs to the weights.")  # fmt: skip
    return RopeScaling(
        *(float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")),
        int(rope["original_max_position_embeddings"]),
    )


def _check_supported(hf: Mapping[str, Any]) -> None:
    rope = _rope(hf)
    found = {
        "model_type": (hf.get("model_type"), tuple(_ARCHITECTURES)),
        "hidden_act": (hf.get("hidden_act", "silu"), ("silu",)),
        "rope type": (_rope_type(rope), ("default", "llama3")),
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


def normal(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(_INIT_STD * jax.random.normal(rngs.params(), shape))


class Attention(nnx.Module):
    """Grouped-query attention with RoPE; bias (if any) on q, k, v, never on o."""

    def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
        D, N, K, H = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.q, self.k, self.v = normal(rngs, D, N, H), normal(rngs, D, K, H), normal(rngs, D, K, H)
        self.o = normal(rngs, N, H, D)
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
        self.gate, self.up, self.down = normal(rngs, D, F), normal(rngs, D, F), normal(rngs, F, D)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        flat = x.reshape(-1, x.shape[-1])  # two axes: XLA on CPU fuses the backward pass better (41 ms against 62)
        # Kept for the backward pass: the two products. What XLA would keep besides is as large again, twice.
        out = jax.checkpoint(lambda a, b: (jax.nn.silu(a) * b) @ down, prevent_cse=False)(flat @ gate, flat @ up)
        return out.reshape(x.shape)


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
        self.embed = normal(rngs, cfg.vocab_size, cfg.hidden_size)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if not cfg.tie_word_embeddings:
            self.head = normal(rngs, cfg.vocab_size, cfg.hidden_size)

    def __call__(self, ids: jax.Array, positions: jax.Array, run_layers: Callable) -> jax.Array:
        x = self.embed[...][ids].astype(self.cfg.dtype)
        return self.norm(run_layers(x, rope_tables(positions, self.cfg)))


# ------------------------------------------------------------------------------------------------------------- RoPE


def rope_frequencies(cfg: DecoderConfig) -> jax.Array:
    """fp32 [H/2], radians per position; the first is 1.

    With Llama 3.1's scaling: a wavelength above original / low_freq_factor is divided by `factor`, one below original /
    high_freq_factor stays, between them the two are blended. Source: transformers `_compute_llama3_parameters`.
    """
    frequencies = cfg.rope_theta ** -(jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    if cfg.rope_scaling is None:
        return frequencies
    scaling = cfg.rope_scaling
    turns = scaling.original_max_position_embeddings * frequencies / (2 * jnp.pi)  # in the old context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


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
def graph_of(module: type[nnx.Module], cfg: DecoderConfig) -> nnx.GraphDef:
    """The static half of a module: split once, merged with arrays wherever it runs."""
    return nnx.split(nnx.eval_shape(lambda: module(cfg, nnx.Rngs(0))))[0]


def fresh(module: type[nnx.Module], cfg: DecoderConfig, key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(module(cfg, nnx.Rngs(key))))


def init(cfg: DecoderConfig, key: jax.Array) -> Params:
    """Trainer parameters: matrices normal(0, 0.02), norms 1, biases 0; fp32. Runs under jit too."""
    outer, inner = jax.random.split(key)
    layers = jax.vmap(lambda k: fresh(Layer, cfg, k))(jax.random.split(inner, cfg.num_layers))
    return {**fresh(Decoder, cfg, outer), "layers": layers}


def param_shapes(cfg: DecoderConfig) -> Params:
    """The trainer layout as jax.ShapeDtypeStructs, without computing anything."""
    return jax.eval_shape(functools.partial(init, cfg), jax.random.key(0))


def _decoder(params: Params, cfg: DecoderConfig) -> Decoder:
    return nnx.merge(graph_of(Decoder, cfg), {name: leaf for name, leaf in params.items() if name != "layers"})


# What the backward pass keeps of a layer; the rest is computed again. All results are the same.
REMAT = {
    "none": None,  # everything is kept: fastest, and memory grows with all activations
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with weights are kept
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input: one more forward pass
}


def forward(params: Params, cfg: DecoderConfig, ids: jax.Array, positions: jax.Array, remat: str = "none") -> jax.Array:
    """Causal forward pass over trainer parameters, one scan over the layers.

    Args: ids, positions int32 [B,T], rows right-padded; `remat` one of REMAT.
    Returns the hidden states after the final norm, [B,T,D] in cfg.dtype; `logits` makes logits of them. Under
    `jax.set_mesh` rows stay on their devices and each layer's matrices come to them (sharding/rules.py).
    """
    graph = graph_of(Layer, cfg)
    attend = functools.partial(causal_attention, kind=cfg.attention)

    def run_layers(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        def step(x, layer):
            layer = rules.gather_tree(layout.cast(layer, cfg.dtype), "layers/", drop=1)  # cast first: half the bytes
            return rules.rows(nnx.merge(graph, layer)(x, rope, attend)), None

        if remat != "none":  # prevent_cse guards against what cannot happen inside a scan, and costs fusion
            step = jax.checkpoint(step, prevent_cse=False, policy=REMAT[remat])
        return jax.lax.scan(step, rules.rows(x), params["layers"])[0]

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
    graph = graph_of(Layer, cfg)

    def run_layers(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        for index, layer in enumerate(params["layers"]):
            x = nnx.merge(graph, layer)(x, rope, functools.partial(attend, index))
        return x

    return _decoder(params, cfg)(ids, positions, run_layers)


def head(params: Params, cfg: DecoderConfig) -> jax.Array:
    """The output matrix [V,D]: the embedding when tied, else the model's own."""
    return params["embed"] if cfg.tie_word_embeddings else params["head"]


def logits(params: Params, cfg: DecoderConfig, hidden: jax.Array) -> jax.Array:
    """hidden [..., D] -> fp32 [..., V]: product in the compute dtype, sums in fp32."""
    return project(hidden, head(params, cfg), cfg.vocab_used)


def project(hidden: jax.Array, head: jax.Array, vocab_used: int | None = None, first: jax.Array | int = 0) -> jax.Array:
    """hidden [..., D], head [V,D] -> logits fp32 [..., V]; rows past `vocab_used` get -1e30, so a probability of 0.

    `first`: the number of head's first row, where it is a part of the vocabulary.

    The one place where sampler and scorer make logits, so that both speak of the same distribution.
    """
    out = jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    if vocab_used is None or (isinstance(first, int) and first + head.shape[0] <= vocab_used):
        return out
    return jnp.where(first + jnp.arange(head.shape[0]) < vocab_used, out, -1e30)
