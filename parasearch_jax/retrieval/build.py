"""Builds an index from a corpus, into a folder that `open_retriever` and the server open.

    python -m parasearch_jax.retrieval.build --corpus=corpus.jsonl --encoder=models/e5-base-v2 --index=flat --out=DIR

The index is DIR/flat; the same command with another --index adds that one, without encoding anything again. A build
that was killed goes on where it stopped. On several machines, each with the corpus: `--part=1/4` encodes a part, and
with all folders DIR/embeddings/*-of-4 on one machine the same command with `--merge` makes the index.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parasearch_jax.errors import UserError
from parasearch_jax.programs import keep_programs

if __name__ == "__main__":
    keep_programs()  # before an encoder imports JAX

from parasearch_jax.data.questions import load_questions
from parasearch_jax.retrieval import named_settings, needs
from parasearch_jax.retrieval.bm25 import check_installed, write_bm25
from parasearch_jax.retrieval.corpus import fingerprint
from parasearch_jax.retrieval.embeddings import ROWS, Part, Vectors, encode_part, join
from parasearch_jax.retrieval.encoders import keep_encoder, make_encoder
from parasearch_jax.retrieval.folder import MANIFEST, check_files, once, read_manifest, write_manifest
from parasearch_jax.retrieval.kinds import KINDS, Parameters, exact_hits, open_index, recall, write_index
from parasearch_jax.retrieval.opening import INDEXES, about_passages
from parasearch_jax.retrieval.passages import Passages, write_passages
from parasearch_jax.retrieval.retriever import Encoder
from parasearch_jax.retrieval.split import sentences

RECALL_AT = (1, 3, 10)
SAMPLE = 256  # queries that recall is measured with
TOLD_EVERY = 10.0  # seconds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="a jsonl file")
    parser.add_argument("--encoder", help="a model directory, or hashed")
    parser.add_argument("--index", choices=INDEXES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the passages, vectors and indexes")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of the encoder")
    parser.add_argument("--words", type=int, default=0, help="split articles into passages of at most so many")
    parser.add_argument("--part", help="encode the i-th of n parts only: i/n")
    parser.add_argument("--merge", action="store_true", help="make the index from parts that are encoded")
    parser.add_argument("--queries", help="questions to measure recall with (default: first sentences of passages)")
    of_index = parser.add_argument_group("of the index; 0, the default, chooses by the size of the corpus")
    of_index.add_argument("--nlist", type=int, default=0, help="ivf, ivfpq: clusters")
    of_index.add_argument("--nprobe", type=int, default=0, help="ivf, ivfpq: clusters that a search looks into")
    of_index.add_argument("--codes", type=int, default=0, help="ivfpq: bytes of a vector")
    of_index.add_argument("--links", type=int, default=0, help="hnsw: links of a vector")
    of_index.add_argument("--build-ef", type=int, default=0, help="hnsw: candidates when a vector is linked")
    of_index.add_argument("--ef", type=int, default=0, help="hnsw: candidates of a search, the most documents it gives")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    if args.words < 0:
        raise UserError(f"--words is {args.words}; it must be 0 or more")
    if args.index == "bm25" and (args.encoder or args.setting or args.part or args.merge or args.queries):
        raise UserError("--index=bm25 encodes nothing: leave out --encoder, --setting, --part, --merge and --queries")
    if args.index != "bm25" and not args.encoder:
        raise UserError(f"--index={args.index} needs --encoder: a model directory, or hashed")
    if args.part and args.merge:
        raise UserError("--part encodes a part and --merge puts all together; give one of them")
    parameters = Parameters(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Parameters)})
    part = Part.parse(args.part) if args.part else Part()
    passages = _passages(args)
    if args.index == "bm25":
        _bm25(args.out, passages)
    else:
        _dense(args, passages, parameters, part)
    if peak := needs.peak_memory():
        print(f"peak memory   {needs.gib(peak)}")


def _passages(args: argparse.Namespace) -> Passages:
    folder = args.out / "passages"
    about = {"corpus_sha256": fingerprint(args.corpus), "words": args.words}
    size = args.corpus.stat().st_size

    def make() -> None:
        needs.check_disk("a copy of the corpus", round(1.1 * size), args.out)
        print(f"corpus        reading {args.corpus}, {needs.gib(size)}", flush=True)
        write_passages(args.corpus, folder, args.words, about)

    once(folder, about, make)
    passages = Passages(folder)
    print(f"passages      {len(passages):,}, {needs.gib(passages.text_bytes)} on disk", flush=True)
    return passages


def _bm25(out: Path, passages: Passages) -> None:
    check_installed()
    folder = out / "bm25"
    if _is_built(folder, {"passages": about_passages(passages.manifest)}):
        return
    text = passages.text_bytes
    needed, there = round(needs.BM25 * text) + needs.PROGRAM, needs.available_memory()
    print(f"index         bm25: {needs.gib(needed)} of memory of {needs.gib(there)}")
    if needed > there:
        raise UserError(
            f"--index=bm25 of {needs.gib(text)} of text needs about {needs.gib(needed)} of memory, {needs.gib(there)} "
            "are available; --index=ivfpq needs the least"
        )
    needs.check_disk("bm25", round(needs.BM25_KEPT * text), out)
    _clear(folder)
    began = time.perf_counter()
    files = write_bm25(folder, (document.contents for document in passages))
    seconds = round(time.perf_counter() - began, 2)
    about = {"index": "bm25", "parameters": {}, "passages": about_passages(passages.manifest), "seconds": seconds}
    write_manifest(folder, about, files)
    print(f"built         {folder} in {needs.duration(seconds)}")


def _dense(args: argparse.Namespace, passages: Passages, parameters: Parameters, part: Part) -> None:
    source = None if args.encoder == "hashed" else Path(args.encoder)
    encoder, settings = make_encoder(source, named_settings(args.setting, "one of the encoder as "), passages)
    params = parameters.resolved(args.index, len(passages), encoder.dim)
    if not args.part:
        needed = needs.gib(needs.check_memory(args.index, len(passages), encoder.dim, parameters))
        print(f"index         {args.index} {params}: {needed} of memory of {needs.gib(needs.available_memory())}")
    of_encoder = keep_encoder(args.out / "encoder", source, settings)
    about = {"encoder": of_encoder, "passages": about_passages(passages.manifest)}
    folder = args.out / "embeddings"
    if (folder / MANIFEST).exists() and not args.part:
        once(folder, about, lambda: None)
        print("encoding      done before")
    else:
        if not args.merge:
            _encode(folder, part, passages, encoder, about)
        if args.part:
            print(f"encoded       part {args.part}; when all are, run the same command with --merge in place of --part")
            return
        join(folder, None if args.merge else 1)
    _index(args, Vectors(folder), passages, encoder, about, params)


def _encode(folder: Path, part: Part, passages: Passages, encoder: Encoder, about: Mapping[str, Any]) -> None:
    """Over all devices of this process, with how far it is."""
    window = ROWS
    if hasattr(encoder, "over"):
        import jax

        encoder = encoder.over(jax.local_devices())
        if jax.default_backend() != "cpu":
            window = encoder.window
    rows = min(len(part.chunks(len(passages), ROWS)) * ROWS, len(passages))
    needs.check_disk("the embeddings", 4 * rows * encoder.dim, folder)
    seconds = needs.seconds_to_encode(encoder, passages, rows)
    cut = getattr(encoder, "cut", 0)
    print(
        f"encoding      {rows:,} passages, {needs.gib(4 * rows * encoder.dim)} on disk: "
        f"about {needs.duration(seconds)} by a first sample",
        flush=True,
    )
    began, told_at, first = time.perf_counter(), time.perf_counter(), None

    def told(done: int, rows: int) -> None:
        nonlocal first, told_at
        first = done if first is None else first
        now = time.perf_counter()
        if done in (rows, first) or now - told_at >= TOLD_EVERY:
            told_at = now
            rate = (done - first) / (now - began)
            left = f", {rate:.0f} a second, {needs.duration((rows - done) / rate)} left" if rate else ""
            print(f"              {done:,} of {rows:,} ({done / max(rows, 1):.0%}){left}", flush=True)

    encode_part(folder, part, passages, encoder, encoder.dim, about, window, told)
    if cut := getattr(encoder, "cut", 0) - cut:
        print(f"              {cut:,} passages were longer than max_length and were cut (counted since this start)")


def _index(args, vectors: Vectors, passages: Passages, encoder: Encoder, about: dict, params: dict[str, int]) -> None:
    folder, kind = args.out / args.index, KINDS[args.index]
    made_of = {name: params[name] for name in kind.made_of}
    about = {"index": args.index, **about, "vectors_sha256": vectors.sha256, "made_of": made_of}
    began = time.perf_counter()
    if _is_built(folder, about):
        manifest = read_manifest(folder)
        files, seconds = list(manifest["files"]), manifest["seconds"]
        print(f"index         {args.index} {made_of} is built; its recall is measured")
    else:
        _clear(folder)
        files = write_index(args.index, folder, vectors, params)
        seconds = round(time.perf_counter() - began, 2)
    index = open_index(args.index, folder, vectors, params)
    queries, of = _queries(args.queries, passages)
    encoded = encoder.encode(queries, kind="query")
    exact = exact_hits(vectors, encoded, max(RECALL_AT))
    found = [[position for position, _ in row] for row in index.search(encoded, min(max(RECALL_AT), index.most))]
    recalls = {f"recall@{k}": round(recall(found, exact, k), 4) for k in RECALL_AT}
    measured = {**recalls, "queries": len(queries), "of": of}
    write_manifest(folder, {**about, "parameters": params, "recall": measured, "seconds": seconds}, files)
    told = ", ".join(f"{value:.3f} at {name.partition('@')[2]}" for name, value in recalls.items())
    print(f"recall        {told}, against flat; {len(queries)} {of}")
    print(f"built         {folder} in {needs.duration(seconds)}")


def _is_built(folder: Path, about: Mapping[str, Any]) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    manifest = read_manifest(folder)
    if any(manifest.get(name) != value for name, value in about.items()):
        return False
    check_files(folder, manifest)
    return True


def _clear(folder: Path) -> None:
    """No manifest stands beside files that are being made anew."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)


def _queries(path: str | None, passages: Passages) -> tuple[list[str], str]:
    """At most SAMPLE texts to search with, evenly from the file or the passages, and what they are."""
    if path:
        questions = load_questions(path)
        return [questions[i].text for i in _evenly(len(questions))], f"questions of {Path(path).name}"
    some = [passages[i].text for i in _evenly(len(passages))]
    return [" ".join(sentences(text)[0]) for text in some], "first sentences of passages"


def _evenly(n: int) -> list[int]:
    some = min(n, SAMPLE)
    return [i * n // some for i in range(some)]


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("parasearch_jax.models.encoder").setLevel(logging.ERROR)  # texts that are cut are counted here
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
