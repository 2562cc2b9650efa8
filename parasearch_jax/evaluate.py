"""Evaluation: the same rollout as in training, greedy, over the whole set; and the numbers read off episodes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from parasearch_jax import hosts
from parasearch_jax.data import Question, load_question_sets
from parasearch_jax.data.answers import Metric, answer_metrics
from parasearch_jax.data.statistics import ratio_intervals
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import Protocol
from parasearch_jax.resume import Sigterm
from parasearch_jax.retrieval import Retriever
from parasearch_jax.rewards import Reward
from parasearch_jax.rewards.format import valid_by_provenance
from parasearch_jax.rollout import Engine, Episode
from parasearch_jax.workdir import Workdir
from parasearch_jax.writers import Console

SAMPLED = "_sampled"  # evaluations at the temperature of training; the others are greedy

Subsets = dict[str, dict[str, Any]]  # {subset: {"n", "em", ...}}, `E` of results.json


def evaluate(
    engine: Engine,
    questions: Sequence[Question],
    protocol: Protocol,
    retriever: Retriever,
    normalizer: str = "squad",
    temperature: float = 0.0,
) -> tuple[Subsets, list[Episode]]:
    """One episode of every question, greedy or sampled, and what they amount to; with several hosts each does a share.

    seconds_per_question is the time of all by their number, with all slots of the engine at work.
    """
    start = time.perf_counter()
    how = {"temperature": temperature}  # step 0 is no training step's, so sampled numbers are those of no rollout
    episodes = hosts.spread(lambda mine: engine.rollout(mine, protocol, retriever, **how), questions)
    seconds = time.perf_counter() - start
    subsets = summarize(episodes, questions, protocol, normalizer, intervals=True)
    for numbers in subsets.values():
        numbers["seconds_per_question"] = seconds / len(questions)
    return subsets, episodes


def load_held_out(config: ConfigDict) -> dict[str, list[Question]]:
    """The questions that a run is measured on: "test", and "dev" where `train.eval_every` asks for it.

    Raises UserError for those, and for a `data.normalizer` that is none.
    """
    answer_metrics(config.data.normalizer)
    wanted = ["test", "dev"] if config.train.steps and config.train.eval_every else ["test"]
    return {split: load_question_sets(config.data[split]) for split in wanted}


def due_evaluations(step: int, config: ConfigDict) -> list[tuple[str, str]]:
    """(name, questions) of the evaluations of the weights of a step: before and after training, and on data.dev."""
    steps, every = config.train.steps, config.train.eval_every
    due = [(f"dev_step_{step:06d}", "dev")] if step and every and step % every == 0 else []
    if step not in (0, steps):
        return due
    name = "final" if step == steps else "initial"
    sampled = [(f"{name}{SAMPLED}", "test")] if config.evaluation.sampled else []
    return [*due, (name, "test"), *sampled]


class Evaluations:
    """Those of a run, by name in `found`. With a `reward` their stored episodes have its parts."""

    def __init__(
        self,
        config: ConfigDict,
        held_out: Mapping[str, Sequence[Question]],
        engine: Engine,
        protocol: Protocol,
        retriever: Retriever,
        work: Workdir,
        console: Console,
        sigterm: Sigterm,
        reward: Reward | None = None,
    ):
        self._reward = reward
        self._config, self._held_out, self._asked = config, held_out, (engine, protocol, retriever)
        self._work, self._console, self._sigterm = work, console, sigterm
        self.found: dict[str, Subsets | None] = {}

    def due(self, step: int) -> None:
        """Makes those that belong to the weights of `step`; what an earlier start has finished is read."""
        for name, split in due_evaluations(step, self._config):
            self.found[name] = self._work.read_evaluation(name)
            if self.found[name] is None and self._asked[0].version == step:  # else those weights are gone
                with self._sigterm.interrupts():
                    self.found[name] = self._make(name, self._held_out[split])

    def _make(self, name: str, questions: Sequence[Question]) -> Subsets:
        engine, protocol, retriever = self._asked
        normalizer = self._config.data.normalizer
        temperature = self._config.algorithm.temperature if name.endswith(SAMPLED) else 0.0
        subsets, episodes = evaluate(engine, questions, protocol, retriever, normalizer, temperature)
        engine.pop_stats()
        retriever.pop_stats()
        em = answer_metrics(normalizer)["em"]
        exact = [em(e.answer, q.golden_answers) for e, q in zip(episodes, questions, strict=True)]
        self._work.write_episodes(name, episodes, questions, self._parts(episodes, questions), exact)
        self._work.write_evaluation(name, subsets)
        share = 100 * subsets["all"]["em"]
        self._console.print(f"{name} evaluation: EM {share:.1f} % of {len(questions)} questions")
        return subsets

    def _parts(self, episodes: Sequence[Episode], questions: Sequence[Question]) -> list[dict] | None:
        """The reward's parts of each episode; None where it can't judge these: it looks at groups, or at what these
        questions have not."""
        if self._reward is None or self._reward.entry.group:
            return None
        try:
            self._reward.check(questions)
            return [self._reward(episode, question)[0] for episode, question in zip(episodes, questions, strict=True)]
        except UserError as error:
            self._console.print(f"evaluated episodes are stored without reward parts: {str(error).splitlines()[0]}")
            return None


def summarize(
    episodes: Sequence[Episode],
    questions: Sequence[Question],
    protocol: Protocol,
    normalizer: str = "squad",
    intervals: bool = False,
) -> Subsets:
    """Means over the episodes of each subset: all, each kind and each data set that occurs.

    `questions[i]` belongs to `episodes[i]`. em, f1, cover_em (whole tokens in a row), cover_em_bag (in any order) and
    valid_format are in [0, 1], dr* in percent of episodes, turns are model calls an episode, extra_calls those beside
    its turns, searches and sub_queries executed ones, tokens_sampled the policy's, in extra calls too, and tokens_read
    those of documents and notices.

    With `intervals` also tool_productivity, the number of right answers by that of searches (OTC; None without any),
    and of each number x the interval x_ci, [lower, upper]: 95 %, percentile bootstrap over questions.
    """
    metrics = answer_metrics(normalizer)
    numbers = [_numbers(e, q, protocol, metrics) for e, q in zip(episodes, questions, strict=True)]
    members: dict[str, list[int]] = {"all": list(range(len(numbers)))}
    for key in ("kind", "dataset"):
        for i, question in enumerate(questions):
            if getattr(question, key):
                members.setdefault(getattr(question, key), []).append(i)
    subsets = {}
    for name, places in members.items():
        rows = [numbers[i] for i in places]
        subsets[name] = {"n": len(rows), **{key: float(np.mean([row[key] for row in rows])) for key in rows[0]}}
        if intervals:
            subsets[name] |= _intervals(rows, [(questions[i].dataset, questions[i].id) for i in places])
    return subsets


def _intervals(rows: Sequence[dict[str, float]], questions: Sequence[Hashable]) -> dict[str, Any]:
    """tool_productivity and all intervals. Samples of one question are drawn together."""
    place = {question: i for i, question in enumerate(dict.fromkeys(questions))}
    owner = [place[question] for question in questions]
    sums, counts = np.zeros((len(place), len(rows[0]))), np.zeros((len(place), 1))
    np.add.at(sums, owner, [list(row.values()) for row in rows])
    np.add.at(counts, owner, 1)
    names = list(rows[0])
    right, searches = (sums[:, [names.index(key)]] for key in ("em", "searches"))
    numerators, denominators = np.hstack([sums, right]), np.hstack([np.repeat(counts, len(names), 1), searches])
    ends = ratio_intervals(numerators, denominators).T.tolist()
    out = {"tool_productivity": float(right.sum() / searches.sum()) if searches.any() else None}
    for key, end in zip([*names, "tool_productivity"], ends, strict=True):
        out[f"{key}_ci"] = [None if math.isnan(value) else value for value in end]
    return out


def _numbers(episode: Episode, question: Question, protocol: Protocol, metrics: dict[str, Metric]) -> dict[str, float]:
    searches = episode.searches
    return {
        **{name: metric(episode.answer, question.golden_answers) for name, metric in metrics.items()},
        "dr": 100.0 * any(len(s.queries) > 1 for s in searches),
        "dr_first": 100.0 * (bool(searches) and len(searches[0].queries) > 1),
        "dr_released": 100.0 * _decomposed_as_released(episode, protocol),
        "turns": episode.turns,
        "extra_calls": len(episode.extra),
        "searches": len(searches),
        "sub_queries": sum(len(s.queries) for s in searches),
        "valid_format": float(valid_by_provenance(episode, protocol)),
        "tokens_sampled": sum(_tokens(each, "policy") for each in (episode, *episode.extra)),
        "tokens_read": _tokens(episode, "docs", "notice"),
    }


def _tokens(episode: Episode, *sources: str) -> int:
    return sum(len(segment.ids or ()) for segment in episode.segments if segment.source in sources)


def _decomposed_as_released(episode: Episode, protocol: Protocol) -> bool:
    """Any `##` between search tags anywhere behind the prompt, as ParallelSearch's `infer_batch.py` counts."""
    if protocol.search is None:
        return False
    opening, closing = map(re.escape, protocol.search)
    blocks = re.findall(f"{opening}(.*?){closing}", episode.response, re.DOTALL)
    return any((protocol.separator or "##") in block for block in blocks)


def rollout_metrics(episodes: Sequence[Episode], questions: Sequence[Question], protocol: Protocol) -> dict[str, float]:
    """The same numbers of a training batch, flat: "rollout/dr_parallel", "rollout/em", "rollout/stop_answer" ..."""
    out: dict[str, float] = {}
    for subset, numbers in summarize(episodes, questions, protocol).items():
        suffix = "" if subset == "all" else f"_{subset}"
        out |= {f"rollout/{key}{suffix}": value for key, value in numbers.items()}
    share: Callable[[Callable], float] = lambda test: float(np.mean([test(e) for e in episodes]))  # noqa: E731
    for reason in ("answer", "turns", "length"):
        out[f"rollout/stop_{reason}"] = share(lambda e, reason=reason: e.stop_reason == reason)
    out["rollout/tokens"] = share(lambda e: e.length())
    out["rollout/dropped_queries"] = share(lambda e: e.dropped_queries)
    out["rollout/failed_searches"] = share(lambda e: e.failed_searches)
    return out
