"""Reinforcement learning: pure functions on arrays [B, T] with a mask, under the index rule of `rl/batch.py`."""

from parasearch_jax.rl.advantages import dr_grpo, gae, grpo, reinforce, reinforce_pp, rloo, whiten
from parasearch_jax.rl.batch import Batch, Row, build_batch, make_row, put_batch, stack_rows
from parasearch_jax.rl.losses import kl, policy_loss, token_weights, value_loss

__all__ = [
    "Batch",
    "Row",
    "build_batch",
    "dr_grpo",
    "gae",
    "grpo",
    "kl",
    "make_row",
    "policy_loss",
    "put_batch",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "stack_rows",
    "token_weights",
    "value_loss",
    "whiten",
]
