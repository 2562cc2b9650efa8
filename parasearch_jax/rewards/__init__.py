"""Rewards by name. Those of the papers are registered here; yours by `register`, or as "package.module:function"."""

from parasearch_jax.rewards import f1, otc, parallel_search, r1_searcher, search_r1, step_search  # noqa: F401
from parasearch_jax.rewards.base import Reward, make_reward, register, score, wrap

__all__ = ["Reward", "make_reward", "register", "score", "wrap"]
