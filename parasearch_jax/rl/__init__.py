"""Reinforcement learning: pure functions on arrays [B, T] with a mask, under the index rule of `rl/batch.py`."""

from parasearch_jax.rl.advantages import gae, grpo, whiten
from parasearch_jax.rl.batch import Batch, build_batch, put_batch
from parasearch_jax.rl.losses import kl, policy_loss, value_loss

__all__ = ["Batch", "build_batch", "gae", "grpo", "kl", "policy_loss", "put_batch", "value_loss", "whiten"]
