"""What each kind of index finds: support recall of question sets, and what building it took.

    python benchmarks/retrieval_quality.py --corpus=corpus.jsonl --encoder=models/all-MiniLM-L6-v2 --out=DIR \
        --questions hotpotqa=hotpotqa.jsonl nq=nq.jsonl --kinds flat ivf ivfpq hnsw bm25

Support recall@5: the share of a question's `supporting_titles` (of its row) that are titles of the five documents found
for it, a mean over the questions that have some. Each kind is built by `python -m parasearch_jax.retrieval.build`, in a
process of its own whose peak memory is told; what lies in DIR already is taken as it is. Flat must give, for every
question, the documents that numpy gives.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
from peers import machine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

K = 5


def main() -> None:
    from parasearch_jax.retrieval.opening import INDEXES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--encoder", help="needed unless the only kind is bm25")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--kinds", nargs="+", default=["flat", "ivf", "hnsw", "bm25"], choices=INDEXES)
    args = parser.parse_args()
    sets = {name: read_questions(path) for name, _, path in (item.partition("=") for item in args.questions)}
    print(machine(), flush=True)
    rows = [row(args, kind, sets) for kind in args.kinds]
    heads = ["index", *(f"{name} ({len(questions)})" for name, questions in sets.items()), "recall@10 of flat",
             "build s", "peak GiB", "files MiB"]  # fmt: skip
    print("\n".join(f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *rows]))


def read_questions(path: str) -> list[tuple[str, set[str]]]:
    """(question, titles that support its answer) of the rows that name some."""
    with open(path, encoding="utf-8") as lines:
        found = map(json.loads, lines)
        return [(row["question"], set(row["supporting_titles"])) for row in found if row.get("supporting_titles")]


def row(args, kind: str, sets: dict[str, list[tuple[str, set[str]]]]) -> list[str]:
    from parasearch_jax.retrieval import open_retriever

    seconds, peak = build(args, kind)
    retriever = open_retriever(args.out / kind)
    try:
        recalls = []
        for questions in sets.values():
            found = retriever.search_sync([text for text, _ in questions], K)
            shares = [
                len(titles & {document.title for document in documents}) / len(titles)
                for (_, titles), documents in zip(questions, found, strict=True)
            ]
            recalls.append(f"{np.mean(shares):.1%}")
            if kind == "flat":
                check_flat(args.out, retriever, [text for text, _ in questions], found)
    finally:
        retriever.close_sync()
    manifest = json.loads((args.out / kind / "manifest.json").read_text())
    recall = f"{manifest['recall']['recall@10']:.3f}" if "recall" in manifest else ""
    place = args.out / ("embeddings" if kind == "flat" else kind)
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) / 2**20
    return [kind, *recalls, recall, f"{seconds:.0f}", f"{peak:.2f}", f"{size:.0f}"]


def build(args, kind: str) -> tuple[float, float]:
    """(seconds, GiB at the peak) of the command."""
    command = [sys.executable, "-m", "parasearch_jax.retrieval.build", f"--corpus={args.corpus}", f"--index={kind}"]
    command += [f"--out={args.out}", *([] if kind == "bm25" else [f"--encoder={args.encoder}"])]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    print(textwrap.indent(done.stdout, "    "), flush=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return seconds, float(re.search(r"peak memory +([\d.]+) GiB", done.stdout)[1])


def check_flat(out: Path, retriever, queries: list[str], found: list) -> None:
    """Exits with the first question for which flat and a matrix product in float64 differ beyond rounding."""
    from parasearch_jax.retrieval.embeddings import Vectors

    vectors = np.concatenate([chunk for _, chunk in Vectors(out / "embeddings").chunks()]).astype(np.float64)
    scores = retriever._encoder.encode(queries, kind="query").astype(np.float64) @ vectors.T
    number = {document.id: i for i, document in enumerate(retriever._documents)}
    for query, row, documents in zip(queries, scores, found, strict=True):
        ours, best = [number[document.id] for document in documents], np.argsort(-row, kind="stable")[:K]
        if not np.allclose(row[ours], row[best], rtol=0, atol=1e-6):
            sys.exit(f"flat differs from numpy for {query!r}: {ours}, {best.tolist()}")
    print(f"    flat equals numpy on {len(queries)} questions", flush=True)


if __name__ == "__main__":
    main()
