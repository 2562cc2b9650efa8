"""The terminal: scripted episodes through a real engine, as they are shown."""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cases import LIMITS
from scripted import PROTOCOL, Fake, until

from parasearch_jax.retrieval import Document
from parasearch_jax.rollout import Engine, RolloutConfig, agent, chat
from parasearch_jax.sharding.mesh import MeshConfig

ROOT = Path(__file__).parents[2]
CONFIG = RolloutConfig(**LIMITS, deterministic=False)


@pytest.fixture(scope="module")
def engine(script):
    made = Engine(script, CONFIG)
    yield made
    made.close()


@pytest.fixture
def show(engine):
    """show(questions, retriever, ask=...) -> what stands on the screen, without the seconds."""

    def run(asked, retriever=None, file=None):
        settings = agent.Settings("m", "", "float32", PROTOCOL, {}, CONFIG, MeshConfig(), 0)
        screen = chat.Screen(file or io.StringIO())
        with engine.session(PROTOCOL, retriever or Fake()) as session:
            made = agent.Agent(settings, engine.tokenizer, session)
            chat.ask_all(made, asked, screen, temperature=0.0)
        return re.sub(r"\d+\.\d s\)", "# s)", screen._console.file.getvalue())

    return run


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_plain_text_is_the_episode_and_its_answer(show):
    assert show(["A"]) == (
        "<think>a</think><search>a1 ## a2</search>"
        "\n\n<information>Doc 1(Title: t0) a1.\nDoc 1(Title: t0) a2.</information>\n\n"
        "\nyes-a\n(turns: 2, searches: 1, queries: 2, # s)\n\n"
    )


def test_the_same_question_has_the_same_answer_whatever_came_before(show):
    alone, twice = show(["A"]), show(["B", "A", "A"])
    assert twice == show(["B"]) + alone + alone


def test_an_episode_without_answer_says_why(show):
    assert "(no answer: turns)" in show(["E"]) and "<search>e3</search>3" in show(["E"])


def test_a_terminal_gets_colours(show, terminal):
    shown = show(["A"], file=terminal)
    for style, text in (
        ("2", "<think>a</think>"),
        ("36", "<search>a1 ## a2</search>"),
        ("90", "</information>"),
        ("1", "yes-a"),
    ):
        start, _, _ = shown[: shown.index(text)].rpartition("\x1b[")
        assert shown[len(start) :].startswith(f"\x1b[{style}m"), text
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == show(["A"])


def test_control_characters_of_a_document_are_not_obeyed(show, terminal):
    class Hostile(Fake):
        def document(self, query, i):
            return Document("0", '"t"\n\x1b]0;x\x07 [b]é[/b] :bug:\r\x9b2J')

    shown = re.sub(r"\x1b\[[\d;]*m", "", show(["A"], Hostile(), terminal))
    assert r"\x1b]0;x\x07 [b]é[/b] :bug:\r\x9b2J" in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def test_control_c_ends_the_question_and_not_the_program(show):
    file, cancelled = io.StringIO(), []

    async def interrupt(query):
        if query == "a1":
            await until(lambda: "</search>" in file.getvalue())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                cancelled.append(query)
                raise

    shown = show(["A", "I"], Fake(interrupt), file)
    assert shown.startswith("<think>a</think><search>a1 ## a2</search>\n(stopped)\n\n")
    assert shown.endswith("\né 😀\n(turns: 1, searches: 0, queries: 0, # s)\n\n")
    assert cancelled == ["a1"]  # at once, and not at the end of the session


def test_a_question_that_can_not_be_asked_is_told(show):
    shown = show(["A" * 300, "I"])
    assert shown.startswith("error: ") and "301 tokens" in shown and "\né 😀\n" in shown


def test_questions_from_a_pipe_are_its_lines():
    screen = chat.Screen(io.StringIO())
    assert list(chat.questions(io.StringIO("one?\n\n  two?  \n"), screen)) == ["one?", "two?"]
    assert screen._console.file.getvalue() == "question> one?\nquestion> two?\n"


def test_questions_at_a_terminal_are_asked_for(monkeypatch, terminal):
    """Ctrl-C drops a line, Ctrl-D ends."""
    typed = iter([" one? ", "", KeyboardInterrupt, "two?", EOFError])

    def read(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert list(chat.questions(terminal, chat.Screen(terminal))) == ["one?", "two?"]


@pytest.mark.slow
def test_as_a_program():
    base, world = ROOT / "parasearch_jax" / "toy" / "base", ROOT / "parasearch_jax" / "toy" / "small_world"
    retriever = f'{{"kind": "local", "corpus": "{world}/corpus.jsonl", "encoder": "hashed", "dim": 32, "topk": 1}}'
    command = [sys.executable, "-m", "parasearch_jax.rollout.chat", f"--model={base}", f"--retriever={retriever}"]
    command += ["--prompt=Question: {question}\n", "--max_total_tokens=320"]
    given = dict(cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300)
    done = subprocess.run([*command, "--question=Who directed Silver Window?"], **given)
    assert done.returncode == 0 and "Huska Breanins\n(turns: 2, searches: 1" in done.stdout, done.stderr
    wrong = subprocess.run([*command, "--chunk=0"], **given)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: ") and "Traceback" not in wrong.stderr
