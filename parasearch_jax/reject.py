r"""Rejection sampling: from several stored episodes of each question, the best good one, for SFT to learn from.

    python launch.py --config=configs/parallel_tiny.py --sample --config.train.steps=6    # 6 x 32 questions x 8 samples
    python -m parasearch_jax.reject --episodes='runs/parallel_tiny_sample/episodes/*.jsonl' --out=runs/good.jsonl \
        --reward=parallel_search
    python launch.py --config=configs/sft_tiny.py

Good is an episode whose executed answer matches exactly (EM) and whose every turn has a valid format; both are
read off the stored segments anew. Of the good ones of a question the `keep` with the highest total of `reward` stay
(none given: all alike), of equal ones the shortest (characters of the policy), then the lowest sample; a text that
occurs twice counts once. The output holds the records as they were, with "em", "parts" and "total" as found here.

Source: best-of-5 correct responses as Search-R1's baseline (arXiv 2503.09516), selected rollouts as R1-Searcher's SFT
baseline (arXiv 2503.05592). Both leave the choice among correct ones open.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from parasearch_jax.data.metrics import em
from parasearch_jax.data.types import KINDS
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import Protocol, get_protocol
from parasearch_jax.rewards import Reward, make_reward
from parasearch_jax.rewards.format import valid_by_provenance
from parasearch_jax.rollout.types import Episode
from parasearch_jax.stored import episode_files, read_stored, to_episode, to_question
from parasearch_jax.writers import write_episodes

NO_ANSWER, WRONG, INVALID, TWICE = "no answer", "wrong answer", "no valid format", "the same text as another"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was kept, and what became of the rest."""

    kept: list[dict]  # by question, in the order in which the questions occur
    asked: Counter  # questions of each kind
    answered: Counter  # those with a good episode
    dropped: Counter  # episodes, by reason


def choose(
    records: Sequence[dict], keep: int = 1, reward: Reward | None = None, protocol: str | Protocol = "parallel"
) -> Choice:
    """The best good episodes of each question, at most `keep` (see the top). `reward` sees all samples of a question
    together. Raises UserError for a record without golden answers, and for a kind that the reward can't do without."""
    protocol = get_protocol(protocol)
    out = Choice([], Counter(), Counter(), Counter())
    groups: dict[tuple[str, str], list[dict]] = {}
    for record in records:  # data sets number their questions alike
        groups.setdefault((record["id"], record["question"]), []).append(record)
    for group in groups.values():
        ranked = list(_ranked(group, reward, protocol, out.dropped))
        out.dropped[f"not among the best {keep}"] += len(ranked[keep:])
        out.kept.extend(ranked[:keep])
        kind = group[0].get("kind", "unknown")
        out.asked[kind] += 1
        out.answered[kind] += bool(ranked)
    return out


def _ranked(group: Sequence[dict], reward: Reward | None, protocol: Protocol, dropped: Counter) -> Iterator[dict]:
    """The good episodes of a question, best first, each text once; counts the others."""
    question, episodes = to_question(group[0]), [to_episode(record, protocol) for record in group]
    parts = [{}] * len(group)
    if reward is not None:
        parts = [found for found, _ in reward.score_group(episodes, question, {})]
    good = []
    for record, episode, found in zip(group, episodes, parts, strict=True):
        if fault := _fault(episode, question.golden_answers, protocol):
            dropped[fault] += 1
            continue
        total = sum(found.values())
        said = sum(len(segment.text) for segment in episode.segments if segment.source == "policy")
        scores = {"em": 1.0} | ({"parts": found, "total": total} if reward is not None else {})
        good.append(((-total, said, episode.sample), episode.response, record | scores))
    seen = set()
    for _, text, record in sorted(good, key=lambda entry: entry[0]):
        if text in seen:
            dropped[TWICE] += 1
        else:
            seen.add(text)
            yield record


def _fault(episode: Episode, golds: Sequence[str], protocol: Protocol) -> str:
    """Why an episode is not good; "" if it is."""
    if episode.answer is None:
        return NO_ANSWER
    if not em(episode.answer, golds):
        return WRONG
    return "" if valid_by_provenance(episode, protocol) else INVALID


def describe(choice: Choice) -> str:
    """The lines of the command."""
    lines = [f"{choice.answered.total()} of {choice.asked.total()} questions have a good episode"]
    for kind in KINDS:
        if choice.asked[kind]:
            lines.append(f"  {kind:<28}{choice.answered[kind]:>6} of {choice.asked[kind]}")
    lines.append(f"{len(choice.kept)} episodes kept, {choice.dropped.total()} dropped")
    lines += [f"  {reason:<28}{count:>6}" for reason, count in choice.dropped.most_common() if count]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    given = flags.FLAGS
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}: put a pattern in quotes, --episodes='DIR/*.jsonl'")
    out, files = Path(given.out), episode_files(given.episodes)
    if out.resolve() in [path.resolve() for path in files]:
        raise UserError(f"--out={out} is one of the files that --episodes names: give another")
    records = read_stored(given.episodes)
    print(f"{len(records)} episodes in {len(files)} files")
    choice = choose(records, given.keep, make_reward(given.reward) if given.reward else None, given.protocol)
    print(describe(choice))
    if not choice.kept:
        raise UserError("no episode is good, so nothing was written: sample more, or from a better model")
    write_episodes(out, choice.kept)
    print(f"written: {out}")


if __name__ == "__main__":
    flags.DEFINE_string("episodes", None, "Stored episodes: files or patterns, with commas.", required=True)
    flags.DEFINE_string("out", None, "File to write, jsonl.", required=True)
    flags.DEFINE_integer("keep", 1, "Episodes kept of a question.", lower_bound=1)
    flags.DEFINE_string("reward", "", "Ranks the good ones: a registered reward or package.module:function.")
    flags.DEFINE_string("protocol", "parallel", "The protocol that the episodes follow.")
    try:
        app.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
