"""The optimizer: AdamW behind a clipped global norm, with a warm-up that moves from the first update on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from parasearch_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Fields of AdamW; the learning rate rises linearly over `warmup_steps` updates, then stays."""

    lr: float
    warmup_steps: int = 0
    zero_start: bool = False  # as released: the first update of the warm-up has a learning rate of 0
    weight_decay: float = 0.01
    clip_norm: float = 1.0  # of the global gradient norm
    b1: float = 0.9
    b2: float = 0.999
    mu_dtype: str = "float32"  # of Adam's first moment; "bfloat16" saves 2 bytes a parameter

    def __post_init__(self):
        for name in ("lr", "clip_norm"):
            if getattr(self, name) <= 0:
                raise UserError(f"optimizer: {name} is {getattr(self, name)}, it must be > 0")
        if self.mu_dtype not in ("float32", "bfloat16"):
            raise UserError(f"optimizer: mu_dtype is {self.mu_dtype!r}; use one of: float32, bfloat16")
        if self.warmup_steps < 0:
            raise UserError(f"optimizer: warmup_steps is {self.warmup_steps}, it must be >= 0 (0: no warm-up)")


def make_optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """AdamW for a parameter tree of dicts: clip by global norm, Adam, decay of matrices only, warm-up then constant."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(
            learning_rate(cfg),
            cfg.b1,
            cfg.b2,
            weight_decay=cfg.weight_decay,
            mask=decayed,
            mu_dtype=cfg.mu_dtype,
        ),
    )


def learning_rate(cfg: OptimConfig) -> optax.Schedule:
    """count (updates done so far) -> learning rate. (count + 1) / warmup: warm-ups that start at 0 waste a batch."""
    first = 0 if cfg.zero_start and cfg.warmup_steps else 1
    return lambda count: cfg.lr * jnp.minimum(1.0, (count + first) / max(cfg.warmup_steps, 1))


def decayed(params):
    """Tree of bools: True for what weight decay applies to, everything but norms and biases.

    Told by name, because a norm stacked over layers [L, D] has the rank of a matrix.
    """

    def decays(path, _):
        leaf = path[-1].key
        return leaf != "scale" and not leaf.endswith("bias")

    return jax.tree.map_with_path(decays, params)
