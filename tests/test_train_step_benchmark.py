"""benchmarks/train_step.py: that both sides compute the step they are named after."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peers
import train_step
import train_step_ours
from train_step_job import STEPS, Job

from parasearch_jax.models import decoder
from parasearch_jax.models.weights import save_model

TINY = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "tie_word_embeddings": True,
}
JOB = Job(rows=4, tokens=48, prompt=8, turns=3, vocab=60)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    cfg, path = decoder.DecoderConfig(**TINY), tmp_path_factory.mktemp("tiny")
    save_model(path, cfg, decoder.init(cfg, jax.random.key(0)), None)
    return str(path)


@pytest.mark.parametrize("job", [JOB, train_step.RL], ids=["tiny", "measured"])
def test_rows_are_full_and_hold_their_share_of_documents(job):
    tokens = {"prompt": 0, "policy": 0, "docs": 0}
    for row, mask in zip(job.segments(), job.policy_mask(), strict=True):
        assert [source for source, _ in row] == ["prompt", "policy", *["docs", "policy"] * (job.turns - 1)]
        assert min(n for _, n in row) > 0 and sum(n for _, n in row) == job.tokens
        for source, n in row:
            tokens[source] += n
        assert mask.sum() == sum(n for source, n in row if source == "policy")
        assert mask[-1] and not mask[: job.prompt].any()
    assert job.response_mask()[:, job.prompt :].all() and not job.response_mask()[:, : job.prompt].any()
    assert tokens["docs"] == round(0.4 * job.size) and tokens["prompt"] == job.rows * job.prompt


@pytest.mark.parametrize("grouped", [True, False])
def test_the_batch_is_the_job(grouped):
    batch = train_step_ours.build_batch(JOB, grouped)
    np.testing.assert_array_equal(batch.ids, JOB.ids())
    np.testing.assert_array_equal(batch.policy_mask, JOB.policy_mask())
    np.testing.assert_array_equal(batch.rewards[:, -1], JOB.rewards())
    assert batch.rewards.sum() == JOB.rewards().sum()
    assert batch.group.tolist() == ([0] * 4 if grouped else [0, 1, 2, 3])


def first_losses(case):
    """What the first step must find: every ratio is 1, the reference is the policy, every value 0."""
    mask, rewards = JOB.policy_mask(), JOB.rewards()
    if case == "ppo":  # whitened advantages have mean 0; returns are the row's reward
        return [0, 0, 0.5 * (mask * rewards[:, None] ** 2).sum() / mask.sum()]
    advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
    return [-(mask * advantages[:, None]).sum() / mask.sum(), 0]


@pytest.mark.parametrize("case", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_losses_of_our_step(directory, case):
    step = train_step_ours.rl_step(directory, case, JOB, micro_rows=2, chunk=16)
    (first, seconds), (second, _) = step(), step()
    np.testing.assert_allclose(first, first_losses(case), atol=1e-5)
    assert set(seconds) == {"score", "update"}
    assert second[1] > 1e-6, "the second step found the reference's weights: the first did not update"


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [JOB.policy_mask(), JOB.response_mask()], ids=["policy", "response"])
@pytest.mark.parametrize("case", ["grpo", "ppo"])
def test_torch_computes_the_same(directory, case, wanted):
    pytest.importorskip("torch", reason="the peer has a Python of its own")
    import train_step_torch

    mine = train_step_ours.rl_step(directory, case, JOB, micro_rows=4, chunk=16)
    theirs = train_step_torch.rl_step(directory, case, JOB, wanted, micro_rows=2)
    for _ in range(STEPS):
        np.testing.assert_allclose(mine()[0], theirs()[0], atol=1e-5)


@pytest.mark.slow
def test_torch_computes_the_same_plain_step(directory):
    pytest.importorskip("torch", reason="the peer has a Python of its own")
    import train_step_torch

    mine, theirs = (module.plain(directory, JOB) for module in (train_step_ours, train_step_torch))
    for _ in range(STEPS):
        np.testing.assert_allclose(mine()[0], theirs()[0], atol=1e-5)


@pytest.mark.slow
def test_buckets_change_no_loss_of_the_small_world():
    (padded, tokens), (cut, also) = (train_step_ours.small_world(padded, questions=4) for padded in (True, False))
    assert tokens == also > 0
    for _ in range(2):
        np.testing.assert_allclose(cut()[0], padded()[0], atol=1e-5)


class Said:
    """A worker that has its answers ready."""

    def __init__(self, check, rate, name=""):
        self.ready, self.closed = {"check": check, "name": name}, False
        self.measure = lambda: {"tokens_per_second": rate, "seconds": {"update": 1 / rate}}

    def close(self):
        self.closed = True


def test_nothing_is_timed_unless_the_losses_agree(capsys):
    case = train_step.CASES["grpo"]
    mine, theirs = Said([1.0, 2.0], 30.0), Said([1.0, 2.0005], 10.0, "the other")
    peers.compare(case, mine, theirs, rounds=2)
    assert "| ratio, pair by pair | 3.00 | 3.00 | 3.00 |" in capsys.readouterr().out
    assert mine.closed and theirs.closed
    for check in ([1.0, 2.01], [1.0, float("nan")]):
        with pytest.raises(SystemExit, match="the losses of five steps differ"):
            peers.compare(case, Said(check, 1.0), theirs, rounds=2)
