"""Rewards by name. `parallel_search` is registered on import; yours by `register` or as "package.module:function"."""

from parasearch_jax.rewards import parallel_search as _parallel_search  # noqa: F401  (registers itself)
from parasearch_jax.rewards.base import Reward, make_reward, register, score, wrap

__all__ = ["Reward", "make_reward", "register", "score", "wrap"]
