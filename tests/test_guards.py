"""Alarms: each sign alone, for as long as it takes, and what a good run shows."""

import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.guards import Guard, GuardConfig, GuardError

GOOD = {
    "entropy": 0.1,
    "kl": 0.02,
    "rollout/valid_format": 0.9,
    "rollout/groups_without_spread": 0.6,
    "rollout/stop_length": 0.1,
    "rollout/rewarded_logprob": -0.1,
    "skipped": 0.0,
}
BAD = {
    "entropy": (0.009, "entropy has collapsed"),
    "kl": (1.1, "left its reference"),
    "rollout/valid_format": (0.49, "no valid format"),
    "rollout/groups_without_spread": (0.96, "teaches nothing"),
    "rollout/stop_length": (0.51, "by their length"),
    "rollout/rewarded_logprob": (-0.61, "unlikelier"),
}


def guard(samples=8, updates=2, earlier=(), **changes):
    return Guard(GuardConfig(**changes), samples, updates, earlier)


@pytest.mark.parametrize("key", BAD)
def test_each_sign_alone(key):
    value, words = BAD[key]
    watching = guard()
    assert watching.look(GOOD) == ([], [])
    for i in range(1, 6):
        signs, alarms = watching.look(GOOD | {key: value})
        (sign,) = signs
        assert words in sign and f"{key} {value:.3g}" in sign
        assert alarms == ([sign] if i == 3 else [])  # told once
    assert watching.look(GOOD) == ([], [])
    assert not watching.look(GOOD | {key: value})[1]  # counts anew


def test_what_is_at_the_limit_or_absent_is_no_sign():
    watching = guard()
    watching.look(GOOD)
    edge = {"entropy": 0.0101, "kl": 1.0, "rollout/valid_format": 0.5, "rollout/stop_length": 0.5}
    assert watching.look(GOOD | edge | {"rollout/groups_without_spread": 0.95}) == ([], [])
    assert watching.look({"skipped": 0.0}) == ([], []) and watching.look({"kl": None}) == ([], [])


def test_a_limit_of_0_is_off_and_groups_of_one_have_no_spread():
    off = dict.fromkeys(("min_entropy", "max_kl", "max_invalid", "max_flat_groups", "max_truncated", "max_fall"), 0.0)
    watching = guard(**off)
    watching.look(GOOD)
    assert watching.look({key: value for key, (value, _) in BAD.items()}) == ([], [])
    assert guard(samples=1).look(GOOD | {"rollout/groups_without_spread": 1.0}) == ([], [])


def test_a_continued_run_remembers():
    """The first entropy, the best log-prob and the count come from the lines of the earlier steps."""
    bad = GOOD | {"entropy": 0.009, "rollout/rewarded_logprob": -0.7}
    watching = guard(earlier=[GOOD, bad, bad])
    assert len(watching.look(bad)[1]) == 2


def test_stop_ends_the_run_and_warn_does_not():
    for on_alarm in ("warn", "stop"):
        watching = guard(on_alarm=on_alarm, patience=1)
        assert watching.stops == (on_alarm == "stop")
        _, alarms = watching.look(GOOD | {"kl": 2.0})
        if on_alarm == "stop":
            with pytest.raises(GuardError, match=r"left its reference.*the last checkpoint is of step 20"):
                watching.check(alarms, 20)
        else:
            watching.check(alarms, 20)


def test_refused_updates_in_a_row_end_the_run():
    """Two a step: three steps in which all were refused; a step in which one went through counts anew."""
    watching = guard(refused=6)
    for skipped in (2, 4, 5, 7, 9):
        watching.look(GOOD | {"skipped": float(skipped)})
        watching.check([], 0)
    watching.look(GOOD | {"skipped": 11.0})
    with pytest.raises(GuardError, match=r"6 updates in a row were refused.*of step 7"):
        watching.check([], 7)


@pytest.mark.parametrize("bad", [{"on_alarm": "panic"}, {"patience": 0}, {"refused": 0}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=f"guard.{next(iter(bad))}"):
        GuardConfig(**bad)
