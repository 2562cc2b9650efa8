"""Reinforcement learning: pure functions on arrays [B, T] with a mask, under the index rule of `rl/batch.py`."""

from parasearch_jax.rl.advantages import grpo
from parasearch_jax.rl.batch import Batch, build_batch
from parasearch_jax.rl.losses import kl, policy_loss

__all__ = ["Batch", "build_batch", "grpo", "kl", "policy_loss"]
