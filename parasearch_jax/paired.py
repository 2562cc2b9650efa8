"""Whether two runs differ: their stored evaluations, question by question.

    python -m parasearch_jax.paired runs/a runs/b                                     # their final evaluations
    python -m parasearch_jax.paired runs/a/episodes/initial.jsonl runs/a/episodes/final.jsonl

Every difference (second minus first) is of the questions that both have answered, with the 95 % interval and the p of
the paired bootstrap; for EM also McNemar's exact test, on the questions that one run alone has right. Several samples
of a question count by their mean, and leave McNemar's test out. p-values are of single comparisons: of twenty that are
none, one is below 0.05.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from parasearch_jax.data.answers import NORMALIZERS, Metric, answer_metrics
from parasearch_jax.data.statistics import mcnemar, paired_bootstrap
from parasearch_jax.errors import UserError
from parasearch_jax.stored import read_stored, to_question

Key = tuple[str, str]  # id, question
Values = dict[Key, dict[str, np.ndarray]]  # {key: {metric: values of its samples}}

# (metric, heading, factor) of each row.
ROWS = (
    ("em", "EM %", 100),
    ("f1", "F1 %", 100),
    ("cover_em", "cover-EM %", 100),
    ("cover_em_bag", "cover-EM, any order %", 100),
    ("dr", "DR %", 100),
    ("turns", "turns", 1),
    ("searches", "searches", 1),
    ("sub_queries", "sub-queries", 1),
)


def find_episodes(path: str, evaluation: str = "final") -> str:
    """The episodes that an argument names: a file or pattern itself, of a work directory its evaluation's.

    Raises UserError for a work directory without them.
    """
    if not Path(path).is_dir():
        return path
    file = Path(path) / "episodes" / f"{evaluation}.jsonl"
    if not file.exists():
        have = sorted(each.stem for each in file.parent.glob("*.jsonl"))
        raise UserError(f"{path} has no evaluation {evaluation!r} ({file}); it has: {', '.join(have) or 'none'}")
    return str(file)


def stored_values(records: Sequence[Mapping], metrics: Mapping[str, Metric]) -> Values:
    """What is compared, of each question: answers scored anew, searches and turns as stored."""
    values: dict[Key, list[dict[str, float]]] = {}
    for record in records:
        values.setdefault(_key(record), []).append(_numbers(record, metrics))
    return {key: {name: np.array([row[name] for row in rows]) for name in rows[0]} for key, rows in values.items()}


def _key(record: Mapping) -> Key:
    """ "nq/test_0" and "test_0" are one question: the prefix says with how many other sets it was evaluated."""
    return record["id"].rpartition("/")[2], record["question"]


def _numbers(record: Mapping, metrics: Mapping[str, Metric]) -> dict[str, float]:
    question = to_question(record)
    if "answer" not in record or not isinstance(record.get("queries"), list):
        raise UserError(f"the stored episode of {record['id']!r} has no 'answer' or no 'queries': take an evaluation's")
    queries = record["queries"]
    return {
        **{name: metric(record["answer"], question.golden_answers) for name, metric in metrics.items()},
        "dr": float(any(len(search) > 1 for search in queries)),
        "turns": float(sum(segment["source"] == "policy" for segment in record["segments"])),
        "searches": float(len(queries)),
        "sub_queries": float(sum(map(len, queries))),
    }


def subsets_of(records: Sequence[Mapping], keys: Sequence[Key]) -> dict[str, list[Key]]:
    """{"all": keys, "parallel": ..., "nq": ...}: those of `keys` in each subset, as results.json has them."""
    of = {_key(record): record for record in records}
    subsets = {"all": list(keys)}
    for field in ("kind", "dataset"):
        for key in keys:
            if of[key].get(field):
                subsets.setdefault(of[key][field], []).append(key)
    return subsets


def compare(first: Values, second: Values, keys: Sequence[Key]) -> dict[str, dict[str, float]]:
    """{metric: {"first", "second", "difference", "low", "high", "p"}} over the questions `keys`, which both have.

    "em" also has "only_first", "only_second" and "mcnemar_p", where each question has one episode on both sides.
    """
    out = {}
    for name, _, _ in ROWS:
        a, b = (np.array([values[key][name].mean() for key in keys]) for values in (first, second))
        found = paired_bootstrap(a, b)
        out[name] = {"first": float(a.mean()), "second": float(b.mean()), "difference": found.value}
        out[name] |= {"low": found.low, "high": found.high, "p": found.p}
        if name == "em" and all(len(values[key][name]) == 1 for key in keys for values in (first, second)):
            only_first, only_second = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
            out[name] |= {"only_first": only_first, "only_second": only_second}
            out[name]["mcnemar_p"] = mcnemar(only_first, only_second)
    return out


def table(subset: str, count: int, found: Mapping[str, Mapping[str, float]]) -> str:
    """One subset in Markdown."""
    lines = [f"| {subset} ({count}) | first | second | difference | 95 % | p |", "|---|---:|---:|---:|---|---:|"]
    for name, heading, factor in ROWS:
        row = found[name]
        a, b, difference, low, high = (factor * row[key] for key in ("first", "second", "difference", "low", "high"))
        lines.append(
            f"| {heading} | {a:.2f} | {b:.2f} | {difference:+.2f} | {low:+.2f} to {high:+.2f} | {row['p']:.4f} |"
        )
    em = found["em"]
    if "mcnemar_p" in em:
        told = f"{em['only_first']} questions only the first has right, {em['only_second']} only the second"
        lines.append(f"\nMcNemar's exact test of EM: {told}: p = {em['mcnemar_p']:.4g}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    given = flags.FLAGS
    if len(argv) != 3:
        raise UserError(f"two runs are compared, {len(argv) - 1} given: name two work directories or episode files")
    metrics = answer_metrics(given.normalizer)
    records = [read_stored(find_episodes(path, given.evaluation)) for path in argv[1:]]
    first, second = (stored_values(each, metrics) for each in records)
    keys = [key for key in first if key in second]
    if not keys:
        raise UserError(f"{argv[1]} and {argv[2]} have no question in common: compare runs on the same data")
    alone = [len(values) - len(keys) for values in (first, second)]
    print(f"{len(keys)} questions in both; {alone[0]} only in the first, {alone[1]} only in the second: left out")
    for subset, of in subsets_of(records[0], keys).items():
        print("\n" + table(subset, len(of), compare(first, second, of)))


if __name__ == "__main__":
    flags.DEFINE_string("evaluation", "final", "Of work directories: initial, final or dev_step_000010.")
    flags.DEFINE_enum("normalizer", "squad", list(NORMALIZERS), "Of EM, F1 and cover-EM.")
    try:
        app.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
