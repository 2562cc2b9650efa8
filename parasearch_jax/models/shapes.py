"""Shapes of public models by name, for plans and benchmarks: nothing has to be downloaded to count bytes.

Source: each model's config.json on the hub. Loading reads the config.json that lies with the weights, never this.
"""

from __future__ import annotations

import math

import jax

from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig, RopeScaling, param_shapes

# name: (hidden, layers, heads, kv-heads, ffn, vocabulary, tied)
_QWEN = {
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": (3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": (5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": (5120, 64, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": (8192, 80, 64, 8, 29568, 152064, False),
}
_LLAMA = {
    "llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256, False),
    "llama-3.1-70b": (8192, 80, 64, 8, 28672, 128256, False),
}
_QWEN_REST = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "model_type": "qwen2", "qkv_bias": True, "vocab_used": 151665}
_LLAMA_REST = {
    "rope_theta": 5e5,
    "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192),
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "qkv_bias": False,
}


def _config(shape: tuple, rest: dict) -> DecoderConfig:
    hidden, layers, heads, kv_heads, ffn, vocabulary, tied = shape
    return DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=ffn,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **rest,
    )


SHAPES = {name: _config(shape, _QWEN_REST) for name, shape in _QWEN.items()} | {
    name: _config(shape, _LLAMA_REST) for name, shape in _LLAMA.items()
}


def named_shape(name: str) -> DecoderConfig:
    """The shape of a public model, bf16 compute; UserError listing the names for one that isn't here."""
    if name.lower() not in SHAPES:
        raise UserError(f"no shape is known by the name {name!r}; use one of: {', '.join(SHAPES)}")
    return SHAPES[name.lower()]


def parameter_count(cfg: DecoderConfig) -> int:
    """Parameters of a decoder, without computing any."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(cfg)))
