r"""A search agent in the terminal: its thoughts, queries, documents and answer, as they come (docs/serving.md).

    python -m parasearch_jax.rollout.chat --model=runs/parallel_tiny
    python -m parasearch_jax.rollout.chat --model=DIR --retriever=retriever.json --question="Who was born first, ...?"

Questions come from standard input, a line each, and are answered one by one without the others. Greedy unless told
otherwise. Ctrl-C ends the question under way, Ctrl-D the program. --model and the rest as in `serve`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

import rich.console

from parasearch_jax.errors import UserError
from parasearch_jax.programs import keep_programs

if __name__ == "__main__":
    keep_programs()  # before the first import of JAX

from parasearch_jax.rollout.agent import Agent, Trace, make_parser, opened, read_settings
from parasearch_jax.rollout.types import Episode

STYLES = {"thought": "dim", "query": "cyan", "docs": "bright_black", "notice": "yellow", "answer": "bold"}


class Screen:
    """Where an episode is shown: in colours on a terminal, as plain text elsewhere."""

    def __init__(self, file: TextIO):
        self.is_terminal = file.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._console = rich.console.Console(
            file=file,
            force_terminal=self.is_terminal,
            force_jupyter=False,
            no_color=not self.is_terminal,
            markup=False,  # "[...]" in a document is text
            highlight=False,
            emoji=False,
        )

    def say(self, text: str, style: str | None = None, end: str = "") -> None:
        """Text as it is, lines not broken; control characters, which a document may hold, are shown and not obeyed."""
        text = re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", lambda found: repr(found[0])[1:-1], text)
        self._console.print(text, style=style, end=end, soft_wrap=True)
        self._console.file.flush()

    def piece(self, kind: str, text: str) -> None:
        if kind == "answer":
            self.say("\n")
        self.say(text, STYLES[kind])


def ask(agent: Agent, question: str, screen: Screen, **sampling) -> Episode:
    """Shows the episode of a question and returns it. Whatever interrupts it frees its slot.

    `sampling`: key, temperature, top_p, top_k of `Session.submit`.
    """
    events: queue.SimpleQueue[tuple[str, str] | type[KeyboardInterrupt] | None] = queue.SimpleQueue()
    trace, start = Trace(agent.settings.protocol), time.perf_counter()
    prompt = agent.prompt([{"role": "user", "content": question}])
    future = agent.session.submit(prompt, on_text=lambda *said: events.put(said), **sampling)
    future.add_done_callback(lambda _: events.put(None))
    try:
        with _interrupted_by(lambda: events.put(KeyboardInterrupt)):
            while (said := events.get()) is not None:
                if said is KeyboardInterrupt:
                    raise said
                for piece in trace.feed(*said):
                    screen.piece(*piece)
        episode = future.result()
        for piece in trace.end(episode):
            screen.piece(*piece)
    finally:
        future.cancel()
    if episode.answer is None:
        screen.say(f"\n(no answer: {episode.stop_reason})", "yellow")
    queries = sum(len(search.queries) for search in episode.searches)
    told = f"turns: {episode.turns}, searches: {len(episode.searches)}, queries: {queries}"
    screen.say(f"\n({told}, {time.perf_counter() - start:.1f} s)", "dim", end="\n\n")
    return episode


@contextlib.contextmanager
def _interrupted_by(call: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls this meanwhile and raises nothing: an exception may fall into a callback of the garbage collector,
    which swallows it."""
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def questions(file: TextIO, screen: Screen) -> Iterator[str]:
    """The lines of a file that hold something. On a terminal each is asked for, and Ctrl-C drops the line begun."""
    if not (file.isatty() and screen.is_terminal):
        for line in filter(None, map(str.strip, file)):
            screen.say(f"question> {line}", end="\n")
            yield line
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives `input` a line editor and a history)
    while True:
        try:
            line = input("question> ").strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if line:
            yield line


def ask_all(agent: Agent, asked: Iterable[str], screen: Screen, **sampling) -> None:
    """Each in turn; the n-th draws the n-th random numbers. Ctrl-C goes on to the next."""
    for number, question in enumerate(asked):
        try:
            ask(agent, question, screen, key=number, **sampling)
        except UserError as error:
            screen.say(f"error: {error}", "red", end="\n\n")
        except KeyboardInterrupt:
            screen.say("\n(stopped)", "yellow", end="\n\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, slots=1)
    parser.add_argument("--question", help="asks this one and ends")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top_p", type=float, default=1.0, help="default: 1, all tokens")
    parser.add_argument("--top_k", type=int, default=0, help="default: 0, all tokens")
    args = parser.parse_args(argv)
    settings, screen = read_settings(args), Screen(sys.stdout)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    with opened(settings) as agent:
        if args.question is not None:
            ask(agent, args.question, screen, **sampling)
        else:
            ask_all(agent, questions(sys.stdin, screen), screen, **sampling)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:  # while it was loading, or of the one question
        sys.exit(130)
