import pytest

from parasearch_jax.rewards.base import REGISTRY


@pytest.fixture(autouse=True)
def registry():
    """What a test registers is gone behind it."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
