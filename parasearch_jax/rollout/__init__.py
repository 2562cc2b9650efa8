"""Rollouts: `Engine` samples episodes; `Episode` and its parts are what travels on."""

from parasearch_jax.rollout.types import Answer, Episode, Invalid, Search, Segment

__all__ = ["Answer", "Engine", "Episode", "Invalid", "RolloutConfig", "Search", "Segment"]


def __getattr__(name: str):
    """Engine on first use: it imports the protocols, which import the types above."""
    if name in ("Engine", "RolloutConfig"):
        from parasearch_jax.rollout import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
