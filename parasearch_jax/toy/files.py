"""The files of the evaluated world. This writes toy/small_world/{corpus,train,test}.jsonl again, byte for byte:

    python -m parasearch_jax.toy.files

A test holds them to it.
"""

from __future__ import annotations

import json
from pathlib import Path

from parasearch_jax.toy.questions import question_rows, split_tasks
from parasearch_jax.toy.world import corpus_rows, make_world

DIRECTORY = Path(__file__).parent / "small_world"


def write_world(directory: Path, seed: int = 0) -> None:
    """corpus.jsonl, train.jsonl and test.jsonl of one world."""
    world = make_world(seed)
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "corpus.jsonl", corpus_rows(world))
    for name, tasks in split_tasks(world, seed).items():
        _write(directory / f"{name}.jsonl", question_rows(name, tasks))


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_world(DIRECTORY)
