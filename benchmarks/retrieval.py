"""The retrieval server under load: queries a second and latency with micro-batching on and off, in turn within one run.

    python benchmarks/retrieval.py server                                        # the small world, hashed encoder
    python benchmarks/retrieval.py server --index=DIR --questions=questions.jsonl   # of parasearch_jax.retrieval.build

Two servers (python -m parasearch_jax.retrieval.server) of the same index run side by side, one with --batch=1; both
without a cache, so that every query is encoded and searched. 1, 8 and 64 clients at once, each with a connection of its
own on which it asks one query after the other, load them in turn. A last row is `RemoteRetriever`, our own client, with
64 searches at once. Before anything is timed, both servers must give the same documents for every query.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from peers import machine

ROOT = Path(__file__).parents[1]
WORLD = ROOT / "parasearch_jax" / "toy" / "small_world"
CLIENTS = (1, 8, 64)
TOPK = 3
OURS = "64 searches of RemoteRetriever"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    server = parts.add_parser("server", help="queries/s and p99 with micro-batching on and off")
    server.add_argument("--index", help="a directory; default: the small world's corpus with the hashed encoder")
    server.add_argument("--questions", default=str(WORLD / "test.jsonl"), help='jsonl with "question": the queries')
    server.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    server.add_argument("--rounds", type=int, default=3)
    server.add_argument("--wait-ms", type=float, default=0.0, help="of the server with batches")
    run_server(parser.parse_args())


def run_server(args) -> None:
    sys.path.insert(0, str(ROOT))
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
