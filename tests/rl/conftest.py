"""A tiny real decoder, and episodes made of random ids, shared by the tests of rl/."""

import jax
import numpy as np
import pytest

from parasearch_jax.models import decoder
from parasearch_jax.rl.batch import build_batch
from parasearch_jax.rollout.types import Episode, Segment


@pytest.fixture(scope="session")
def cfg():
    return decoder.DecoderConfig(
        vocab_size=50,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def params(cfg):
    """Initial weights with the embedding scaled up, so that the distributions are far from uniform."""
    params = decoder.init(cfg, jax.random.key(0))
    return {**params, "embed": params["embed"] * 10}


def make_episode(rng, question_id, sizes=(3, 4, 5, 2), sample=0):
    """prompt, policy, docs, policy with `sizes` random ids each and made-up log-probs."""

    def segment(source, n):
        logprobs = tuple(-rng.random(n)) if source == "policy" else None
        return Segment(source, "", tuple(int(i) for i in rng.integers(1, 50, n)), logprobs)

    sources = ("prompt", "policy", "docs", "policy")
    return Episode(
        [segment(*pair) for pair in zip(sources, sizes, strict=True)], question_id=question_id, sample=sample
    )


@pytest.fixture(scope="session")
def episodes():
    """Two groups of four, of unequal lengths, and one row without policy tokens among them."""
    rng = np.random.default_rng(0)
    sizes = [
        (3, 4, 5, 2),
        (3, 9, 6, 3),
        (3, 2, 3, 1),
        (3, 5, 8, 6),
        (5, 3, 2, 4),
        (5, 1, 4, 2),
        (5, 0, 6, 0),
        (5, 6, 3, 7),
    ]
    return [make_episode(rng, "ab"[i // 4], size, i % 4) for i, size in enumerate(sizes)]


@pytest.fixture(scope="session")
def batch(episodes):
    rewards = [({"total": r}, ()) for r in (1.0, 0.0, 0.5, 1.1, 0.0, 1.0, 0.0, 0.25)]
    return jax.device_put(build_batch(episodes, rewards, tokens=24))
