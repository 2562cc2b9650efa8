"""Rows, masks, rewards and groups of a batch, element for element (T05, T06, issue 2)."""

import dataclasses

import jax
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.rl import policy_loss
from parasearch_jax.rl.batch import build_batch
from parasearch_jax.rollout.types import Answer, Episode, Search, Segment

PIECES = ["<pad>", "he", "llo", "hello", "Q:", "\n", "<search>", "</search>", "<end>", "doc", "<information>"]
NOTHING = ({}, ())


def ids_of(*pieces):
    return tuple(PIECES.index(p) for p in pieces)


def segment(source, *pieces, logprobs=None):
    if source == "policy" and logprobs is None:
        logprobs = tuple(-0.1 * (i + 1) for i in range(len(pieces)))
    return Segment(source, "".join(pieces), ids_of(*pieces), logprobs)


def two_turns(question_id="q"):
    """The policy wrote `hello` as he + llo; encoding its text again would give one id."""
    segments = [
        segment("prompt", "Q:", "hello", "\n"),
        segment("policy", "<search>", "he", "llo", "</search>"),
        segment("docs", "\n", "<information>", "doc", "doc", "\n"),
        segment("policy", "hello", "<end>"),
    ]
    actions = [Search(("hello",), (1, 0, 20)), Answer("hello", (3, 0, 5))]
    return Episode(segments, actions, "answer", question_id, version=7)


def test_t05_row_holds_the_sampled_ids():
    episode = two_turns()
    batch = build_batch([episode], [NOTHING], 16)
    row = [4, 3, 5, 6, 1, 2, 7, 5, 10, 9, 9, 5, 3, 8]
    assert batch.ids[0].tolist() == [*row, 0, 0]
    assert "".join(PIECES[i] for i in row) == "".join(s.text for s in episode.segments)
    np.testing.assert_allclose(batch.logprobs[0], [0, 0, 0, -0.1, -0.2, -0.3, -0.4, 0, 0, 0, 0, 0, -0.1, -0.2, 0, 0])
    assert batch.positions[0].tolist() == list(range(16))
    assert (batch.lengths.tolist(), batch.version.tolist(), batch.group.tolist()) == ([14], [7], [0])


def test_t05_unequal_lengths_raise():
    with pytest.raises(ValueError, match="2 ids but 1 log-probs"):
        Segment("policy", "hello", ids_of("he", "llo"), (-0.1,))
    episode = two_turns()
    object.__setattr__(episode.segments[1], "logprobs", (-0.1,))  # behind the back of Segment's own check
    with pytest.raises(ValueError, match="14 ids, 11 log-probs, 14 mask entries"):
        build_batch([episode], [NOTHING], 16)


def test_t06_mask_comes_from_the_source_when_pad_is_the_end_id():
    end = PIECES.index("<end>")
    batch = build_batch([two_turns()], [NOTHING], 16, pad_id=end)
    assert batch.ids[0, 13:].tolist() == [end] * 3
    assert batch.policy_mask[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0]


def test_t06_padding_on_the_left_is_only_a_longer_prompt():
    padded = two_turns()
    padded.segments.insert(0, segment("prompt", "<pad>", "<pad>"))
    plain, shifted = (build_batch([e], [NOTHING], 16).policy_mask[0] for e in (two_turns(), padded))
    assert shifted.tolist() == [0, 0, *plain.tolist()[:14]]


def test_t06_policy_like_ids_in_the_prompt_stay_masked():
    episode = two_turns()
    episode.segments.insert(0, segment("prompt", "<search>", "he", "llo", "</search>", "hello", "<end>"))
    batch = build_batch([episode], [NOTHING], 24)
    assert batch.policy_mask[0, :9].sum() == 0
    assert batch.policy_mask.sum() == 6


def test_t06_gradient_of_masked_log_probs_is_exactly_zero():
    batch = build_batch([two_turns()], [NOTHING], 16)
    advantages = np.ones((1, 16), np.float32)
    grad = jax.grad(lambda lp: policy_loss(lp, batch.logprobs, advantages, batch.policy_mask)[0])(batch.logprobs)
    assert (np.asarray(grad != 0) == (batch.policy_mask == 1)).all()


def test_rewards_sit_on_policy_tokens():
    episode = two_turns()
    episode.segments.append(segment("docs", "doc", "doc"))  # the last id is a document: the total must not sit there
    batch = build_batch([episode], [({"em": 1.0, "format": -0.25}, [(0, 0.5), (1, 2.0)])], 16)
    expected = np.zeros(16)
    expected[6], expected[13] = 0.5, 0.75 + 2.0
    np.testing.assert_array_equal(batch.rewards[0], expected)


def test_groups_by_question_in_any_row_order():
    batch = build_batch([two_turns(q) for q in "abacb"], [NOTHING] * 5, 16)
    assert batch.group.tolist() == [0, 1, 0, 2, 1]


def test_filled_up_to_whole_micro_batches():
    batch = build_batch([two_turns(q) for q in "abc"], [NOTHING] * 3, 16, multiple=4)
    assert batch.ids.shape == (4, 16)
    assert batch.policy_mask[3].sum() == 0 and batch.lengths.tolist() == [14, 14, 14, 0]
    assert batch.group.tolist() == [0, 1, 2, 3]


def test_episode_without_policy_tokens_is_a_masked_row():
    episode = Episode([segment("prompt", "Q:")], question_id="q", stop_reason="cancelled")
    batch = build_batch([episode], [({"total": 0.0}, None)], 4)
    assert batch.policy_mask.sum() == 0 and batch.rewards.sum() == 0


def _text_only(episode):
    episode.segments[2] = Segment("docs", "doc")


def _no_logprobs(episode):
    episode.segments[1] = dataclasses.replace(episode.segments[1], logprobs=None)


def _no_prompt(episode):
    del episode.segments[0]


def _no_question(episode):
    episode.question_id = ""


@pytest.mark.parametrize(
    ("damage", "reward", "message"),
    [
        (_text_only, NOTHING, "docs segment 2 has no ids"),
        (_no_logprobs, NOTHING, "policy segment 1 has no log-probs"),
        (_no_prompt, NOTHING, "starts with a policy id"),
        (_no_question, NOTHING, "has no question_id"),
        (None, ({"em": float("nan")}, ()), "is not finite"),
        (None, ({}, [(0, float("inf"))]), "is not finite"),
        (None, ({}, [(2, 1.0)]), "action 2, but the episode has 2 actions"),
        (None, ({}, [(-1, 1.0)]), "action -1, but the episode has 2 actions"),
    ],
)
def test_what_cannot_be_trained_on_is_named(damage, reward, message):
    episode = two_turns()
    if damage:
        damage(episode)
    with pytest.raises(ValueError, match=message):
        build_batch([episode], [reward], 16)


def test_step_reward_of_an_action_without_policy_tokens_raises():
    episode = two_turns()
    episode.actions[0] = Search(("hello",), (2, 0, 1))
    with pytest.raises(ValueError, match="action 0 points at segment 2"):
        build_batch([episode], [({}, [(0, 1.0)])], 16)


def test_too_long_an_episode_is_an_error_not_a_cut():
    with pytest.raises(
        UserError, match=r"the episode of question 'q', sample 0, has 14 tokens.*holds 13.*larger bucket"
    ):
        build_batch([two_turns()], [NOTHING], 13)


def test_no_episodes_and_missing_rewards_raise():
    with pytest.raises(ValueError, match="0 episodes"):
        build_batch([], [], 16)
    with pytest.raises(ValueError, match="zip"):
        build_batch([two_turns()], [], 16)
