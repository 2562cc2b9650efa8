"""From episodes to one padded batch. Every mask of the package is made here, from `Segment.source`.

Axes: B batch (rows), T tokens. Rows are left-aligned, so padding is on the right and causal attention never sees it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.rollout.types import Episode
from parasearch_jax.sharding import rules

Reward = tuple[dict[str, float], Sequence[tuple[int, float]] | None]  # (parts, steps), as design section 3 has them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What an update reads. Index t speaks of token t: `logprobs[b, t] = log p(ids[b, t] | ids[b, :t])`.

    ids: int32 [B, T], token ids as they stood in the model's context; `pad_id` behind the end.
    positions: int32 [B, T], 0 1 2 ... in every row, padding included.
    policy_mask: float32 [B, T], 1 where the policy sampled the id, 0 on prompt, documents, notices and padding.
    logprobs: float32 [B, T], the sampler's log p of each policy id at the sampling temperature, 0 elsewhere.
    rewards: float32 [B, T], the total on the last policy token, step rewards on the last token of their action.
    lengths: int32 [B], ids in the row without padding; 0 for a row that only fills up the devices.
    group: int32 [B], rows of one question have one number, smaller than B.
    version: int32 [B], version of the weights that sampled the row.
    truncated: bool [B], the episode ended with `length`.
    """

    ids: jax.Array
    positions: jax.Array
    policy_mask: jax.Array
    logprobs: jax.Array
    rewards: jax.Array
    lengths: jax.Array
    group: jax.Array
    version: jax.Array
    truncated: jax.Array


class Row(NamedTuple):
    """An episode and its reward, as a row of a batch has them: arrays [n] of its own length n."""

    name: str  # for messages
    question_id: str
    version: int
    truncated: bool
    ids: np.ndarray  # int32; this and the next three as in Batch
    policy_mask: np.ndarray  # float32
    logprobs: np.ndarray  # float32
    rewards: np.ndarray  # float32


def make_row(episode: Episode, reward: Reward) -> Row:
    """The row of an episode with the reward (parts, steps). Without policy tokens its mask is 0.

    Raises ValueError for an episode that cannot be trained on as it is: no ids, lists of unequal length, no question
    id, a reward that is not finite.
    """
    name = f"the episode of question {episode.question_id!r}, sample {episode.sample},"
    ids, mask, logprobs, ends = _flatten(name, episode)
    rewards = np.zeros(len(ids), np.float32)
    for t, value in _placed(name, episode, reward, mask, ends):
        rewards[t] += value
    columns = np.asarray(ids, np.int32), np.asarray(mask, np.float32), np.asarray(logprobs, np.float32)
    truncated = episode.stop_reason == "length"
    return Row(name, _question_id(name, episode), episode.version, truncated, *columns, rewards)


def build_batch(
    episodes: Sequence[Episode], rewards: Sequence[Reward], tokens: int, pad_id: int = 0, multiple: int = 1
) -> Batch:
    """Episodes and their rewards as a batch; errors of `make_row`, the rest as in `stack_rows`."""
    rows = [make_row(*pair) for pair in zip(episodes, rewards, strict=True)]
    return stack_rows(rows, tokens, pad_id, multiple)


def stack_rows(rows: Sequence[Row], tokens: int, pad_id: int = 0, multiple: int = 1) -> Batch:
    """Rows as a batch of numpy arrays with T = `tokens`, in the order given.

    B is filled up to a multiple of `multiple` with rows of length and mask 0. Raises UserError for a row that is longer
    (nothing is cut).
    """
    if not rows:
        raise ValueError("a batch of 0 episodes: it needs at least one")
    longest = max(rows, key=lambda row: len(row.ids))
    if len(longest.ids) > tokens:
        raise UserError(
            f"{longest.name} has {len(longest.ids)} tokens, the largest bucket holds {tokens}: add a larger bucket or "
            "lower the rollout's token budget (episodes are never cut)"
        )
    batch = _blank(math.ceil(len(rows) / multiple) * multiple, tokens, pad_id)
    groups: dict[str, int] = {}
    for b, row in enumerate(rows):
        n = len(row.ids)
        for name in ("ids", "policy_mask", "logprobs", "rewards"):
            getattr(batch, name)[b, :n] = getattr(row, name)
        batch.lengths[b], batch.version[b], batch.truncated[b] = n, row.version, row.truncated
        batch.group[b] = groups.setdefault(row.question_id, len(groups))
    batch.group[len(rows) :] = len(groups)  # fits: there is such a row only if B > rows >= groups
    return batch


def put_batch(batch: Batch, mesh: jax.sharding.Mesh) -> Batch:
    """The batch on the devices of a mesh, its rows over 'fsdp'. With several hosts each passes the same whole batch,
    and holds its own rows."""
    sharding = jax.NamedSharding(mesh, rules.ROWS)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), batch)


def response_mask(batch: Batch) -> jax.Array:
    """float32 [B, T]: 1 from a row's first policy token to its end, documents and notices included; 0 on prompt and
    padding. What the released code takes for time steps of GAE, for whitening and for the critic's loss."""
    begun = jax.lax.cummax(batch.policy_mask, axis=1)
    return begun * (batch.positions < batch.lengths[:, None])


def _blank(B: int, T: int, pad_id: int) -> Batch:
    return Batch(
        ids=np.full((B, T), pad_id, np.int32),
        # Padding goes on counting: a mask that compares positions then hides it from the tokens before it.
        positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        policy_mask=np.zeros((B, T), np.float32),
        logprobs=np.zeros((B, T), np.float32),
        rewards=np.zeros((B, T), np.float32),
        lengths=np.zeros(B, np.int32),
        group=np.zeros(B, np.int32),
        version=np.zeros(B, np.int32),
        truncated=np.zeros(B, bool),
    )


def _flatten(name: str, episode: Episode) -> tuple[list[int], list[float], list[float], list[int]]:
    """Ids, mask and log-probs of all segments in one line, and the end of each segment in it.

    Example: prompt (7 8), policy (3 4), docs (9) -> [7 8 3 4 9], [0 0 1 1 0], [0 0 p p 0], ends [2 4 5].
    """
    ids, mask, logprobs, ends = [], [], [], []
    for i, segment in enumerate(episode.segments):
        sampled = segment.source == "policy"
        if segment.ids is None or (sampled and segment.logprobs is None):
            lacking = "ids" if segment.ids is None else "log-probs"
            raise ValueError(
                f"{name}: {segment.source} segment {i} has no {lacking}; only episodes from a rollout can be trained on"
            )
        ids += segment.ids
        mask += [float(sampled)] * len(segment.ids)
        logprobs += segment.logprobs if sampled else [0.0] * len(segment.ids)
        ends.append(len(ids))
    if not len(ids) == len(logprobs) == len(mask):
        raise ValueError(f"{name}: {len(ids)} ids, {len(logprobs)} log-probs, {len(mask)} mask entries; must be equal")
    if mask and mask[0]:
        raise ValueError(f"{name} starts with a policy id, which nothing predicts: put at least one prompt id first")
    return ids, mask, logprobs, ends


def _placed(name: str, episode: Episode, reward: Reward, mask: list[float], ends: list[int]):
    """(index, value) of the total and of each step reward."""
    parts, steps = reward
    values = [*parts.values(), *(value for _, value in steps or ())]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name}: reward {parts}, steps {steps} is not finite; mend the reward function")
    policy = np.flatnonzero(mask)
    if policy.size:
        yield policy[-1], sum(parts.values())
    for action, value in steps or ():
        yield _last_token(name, episode, action, mask, ends), value


def _last_token(name: str, episode: Episode, action: int, mask: list[float], ends: list[int]) -> int:
    """Index of the last token of an action's segment."""
    if not 0 <= action < len(episode.actions):
        raise ValueError(f"{name}: step reward for action {action}, but the episode has {len(episode.actions)} actions")
    segment = episode.actions[action].span[0]
    if not episode.segments[segment].ids or not mask[ends[segment] - 1]:
        raise ValueError(f"{name}: action {action} points at segment {segment}, which holds no policy token")
    return ends[segment] - 1


def _question_id(name: str, episode: Episode) -> str:
    if not episode.question_id:
        raise ValueError(f"{name} has no question_id: set it, the groups of GRPO are formed by it")
    return episode.question_id
