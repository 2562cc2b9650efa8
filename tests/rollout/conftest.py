"""The engine's tests share two models, so that what one of them compiles serves the others."""

import pytest
from cases import LIMITS, SCRIPTS
from scripted import random_model, scripted_model

from parasearch_jax.rollout import Engine


@pytest.fixture(scope="session")
def script():
    """The model that says what cases.SCRIPTS tell it to."""
    return scripted_model(SCRIPTS)


@pytest.fixture(scope="session")
def dice():
    """Random weights."""
    return random_model()


@pytest.fixture
def start():
    """start(model, **changes) -> Engine with cases.LIMITS, closed at the end."""
    engines = []

    def make(model, seed=0, **changes):
        engines.append(Engine(model, seed=seed, **(LIMITS | changes)))
        return engines[-1]

    yield make
    for each in engines:
        each.close()
