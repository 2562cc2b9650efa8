"""Stored episodes (episodes/*.jsonl) as input: for SFT (sft.py) and for the choice of what it learns from (reject.py).

A record is a line as `writers.episode_record` writes it. Needed are "id", "question" and "segments", the first of which
is the prompt; choosing also needs "golden_answers". Files made elsewhere need no more than these.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import Protocol
from parasearch_jax.rollout.types import SOURCES, Episode
from parasearch_jax.writers import read_episodes

HOW = (
    "sample some with `python launch.py --config=configs/parallel_tiny.py --sample`, or take episodes/step_*.jsonl of "
    "a run, and choose the good ones with `python -m parasearch_jax.reject`"
)


def episode_files(spec: str) -> list[Path]:
    """The files of "a.jsonl", "runs/a/episodes/step_*.jsonl" or several of these with commas, each once.

    Raises UserError for an item that names no file.
    """
    files: list[Path] = []
    for item in filter(None, (item.strip() for item in spec.split(","))):
        found = [item] if Path(item).is_file() else sorted(filter(os.path.isfile, glob.glob(item, recursive=True)))
        if not found:
            raise UserError(f"there are no stored episodes {item!r}: {HOW}")
        files += map(Path, found)
    if not files:
        raise UserError(f"stored episodes {spec!r} name no file: {HOW}")
    return list(dict.fromkeys(files))


def read_stored(spec: str) -> list[dict]:
    """The records of all files that `episode_files(spec)` names, in order.

    Raises UserError naming file and line for one that is no episode, and for files without any.
    """
    records = []
    for path in episode_files(spec):
        try:
            lines = read_episodes(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"stored episodes {path} can't be read as UTF-8 text: {error}") from error
        for number, record in enumerate(lines, 1):
            if fault := _fault(record):
                raise UserError(f"{path}, line {number} is no stored episode: {fault}; {HOW}")
        records += lines
    if not records:
        raise UserError(f"stored episodes {spec!r} hold no episode: {HOW}")
    return records


def _fault(record: Any) -> str:
    """What is wrong with a record; nothing: ""."""
    if not isinstance(record, Mapping):
        return f"it holds {str(record)[:40]!r}, not an object"
    for name in ("id", "question"):
        if not isinstance(record.get(name), str) or not record[name]:
            return f"its {name!r} is {record.get(name)!r}, not a text"
    segments = record.get("segments")
    if not isinstance(segments, list) or not all(map(_is_segment, segments)):
        return f'its "segments" are no list of {{"source": one of {", ".join(SOURCES)}; "text"}}'
    sources = [segment["source"] for segment in segments]
    if sources[:1] != ["prompt"] or "prompt" in sources[1:]:
        return "the prompt has to be its first segment, and only that"
    if not any(segment["text"] for segment in segments if segment["source"] == "policy"):
        return "the policy says nothing in it"
    return ""


def _is_segment(segment: Any) -> bool:
    return isinstance(segment, Mapping) and segment.get("source") in SOURCES and isinstance(segment.get("text"), str)


def to_question(record: Mapping) -> Question:
    """The question that a record answers. Raises UserError if it has no golden answers."""
    golds = record.get("golden_answers")
    if not isinstance(golds, list) or not golds:
        raise UserError(f"the stored episode of {record['id']!r} has no golden_answers: nothing tells if it is right")
    return Question(
        record["id"], record["question"], tuple(golds), record.get("kind", "unknown"), record.get("dataset", "")
    )


def to_episode(record: Mapping, protocol: str | Protocol) -> Episode:
    """The episode of a record, from its texts, to be scored again (see `Episode.from_text`)."""
    pairs = [(segment["source"], segment["text"]) for segment in record["segments"]]
    episode = Episode.from_text(pairs, protocol, record["question"])
    episode.question_id, episode.sample = record["id"], record.get("sample", 0)
    episode.stop_reason = record.get("stop_reason", episode.stop_reason)
    return episode
