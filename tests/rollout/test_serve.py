"""The endpoint: scripted episodes through a real engine, and a session that only takes notes where none is needed."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import httpx
import parallel_tiny
import pytest
from cases import LIMITS, SCRIPTS
from scripted import PROTOCOL, Fake, byte_tokenizer

from parasearch_jax import resume
from parasearch_jax.errors import UserError
from parasearch_jax.rollout import Engine, RolloutConfig, agent, openai_format, serve
from parasearch_jax.sharding.mesh import MeshConfig

ROOT = Path(__file__).parents[2]
CONFIG = RolloutConfig(**LIMITS, deterministic=False)


def settings(**changes):
    values = dict(name="tiny", model="", dtype="float32", protocol=PROTOCOL, retriever={}, rollout=CONFIG, seed=0)
    return agent.Settings(**(values | {"mesh": MeshConfig()} | changes))


class Notes:
    """A session that keeps what it was asked for, and leaves every episode open."""

    def __init__(self):
        self.calls, self.futures = [], []

    def submit(self, prompt, **given):
        self.calls.append({"prompt": prompt, **given})
        self.futures.append(Future())
        return self.futures[-1]


@contextlib.contextmanager
def scripted_agent(script, retriever):
    engine = Engine(script, CONFIG)
    with engine.session(PROTOCOL, retriever) as session:
        yield agent.Agent(settings(), engine.tokenizer, session)
    engine.close()


@pytest.fixture(scope="module")
def scripted(script):
    with scripted_agent(script, Fake()) as made:
        yield made


def noted(**changes):
    return agent.Agent(settings(**changes), byte_tokenizer(), Notes())


def call(app, method, path, **given):
    async def run():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.wait_for(client.request(method, path, **given), 60)

    return asyncio.run(run())


def body(question="A", **more):
    return {"messages": [{"role": "user", "content": question}], "temperature": 0} | more


def post(app, question="A", **more):
    return call(app, "POST", "/v1/chat/completions", json=body(question, **more))


def events(response):
    """The events of a stream, without [DONE], which must be the last."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last, empty = response.text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks, index=0):
    """(reasoning, content) of a streamed choice."""
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return tuple("".join(d.get(key, "") for d in deltas) for key in ("reasoning_content", "content"))


# -------------------------------------------------------------------------------------------------------------- answers


def test_an_answer_in_full(scripted):
    found = post(serve.create_app(scripted), model="tiny").json()
    (choice,) = found["choices"]
    documents = "\n\n<information>Doc 1(Title: t0) a1.\nDoc 1(Title: t0) a2.</information>\n\n"
    assert choice["message"] == {
        "role": "assistant",
        "content": "yes-a",
        "reasoning_content": "<think>a</think><search>a1 ## a2</search>" + documents,
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop" and choice["index"] == 0
    assert choice["parasearch"] == {
        "stop_reason": "answer",
        "turns": 2,
        "searches": 1,
        "queries": [["a1", "a2"]],
        "failed_searches": 0,
        "dropped_queries": 0,
    }
    # The tokenizer encodes text to bytes, and the model says a piece a token.
    sampled = sum(map(len, SCRIPTS["A"]))
    assert found["usage"] == {
        "prompt_tokens": len("A\n"),
        "completion_tokens": sampled,
        "total_tokens": len("A\n") + sampled,
        "completion_tokens_details": {"environment_tokens": len(documents)},
    }
    assert (found["object"], found["model"]) == ("chat.completion", "tiny")


def test_without_an_answer_the_content_is_empty(scripted):
    (choice,) = post(serve.create_app(scripted), "E").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["parasearch"]["stop_reason"] == "turns" and choice["parasearch"]["searches"] == CONFIG.max_turns
    assert choice["message"]["reasoning_content"].endswith("<search>e3</search>3")  # the last one was not executed


def test_choices_of_a_request_come_in_order_and_count_their_prompt_once(scripted):
    one, two = (post(serve.create_app(scripted), n=n).json() for n in (1, 2))
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert [choice["message"] for choice in two["choices"]] == [one["choices"][0]["message"]] * 2
    assert two["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert two["usage"]["completion_tokens"] == 2 * one["usage"]["completion_tokens"]


@pytest.mark.parametrize("question", SCRIPTS)
def test_a_stream_is_the_answer_in_parts(scripted, question):
    """Never a piece that is taken back: an answer block left open is no content, and no half of a character."""
    app = serve.create_app(scripted)
    whole = post(app, question).json()
    chunks = events(post(app, question, stream=True, stream_options={"include_usage": True}))
    (choice,) = whole["choices"]
    assert joined(chunks) == (choice["message"]["reasoning_content"], choice["message"]["content"])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    kinds = [next(iter(c["delta"])) for chunk in chunks[1:] for c in chunk["choices"] if c["delta"]]
    assert kinds == sorted(kinds, reverse=True)  # reasoning_content, then content
    last, usage = chunks[-2:]
    assert {key: last["choices"][0][key] for key in ("delta", "finish_reason", "parasearch")} == {
        "delta": {},
        "finish_reason": choice["finish_reason"],
        "parasearch": choice["parasearch"],
    }
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and whole["id"] != chunks[0]["id"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_choices_are_streamed_side_by_side(scripted):
    app = serve.create_app(scripted)
    chunks = events(post(app, n=2, stream=True))
    message = post(app).json()["choices"][0]["message"]
    assert joined(chunks, 0) == joined(chunks, 1) == (message["reasoning_content"], message["content"])
    assert [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] in ([0, 1], [1, 0])
    assert not any("usage" in chunk for chunk in chunks)  # it was not asked for


def test_a_stream_begins_before_the_episode_ends(script):
    """Its pieces are sent as they come: the query before its documents are there."""
    asked, found = threading.Event(), threading.Event()

    async def held(query):
        asked.set()
        await asyncio.to_thread(found.wait, 30)

    with scripted_agent(script, Fake(held)) as made:

        async def run():
            request = openai_format.parse_request(body(), "tiny", 4)
            episodes = serve.Service(made, 1).submit(request, stream=True)
            said = ""
            async for _, source, what in episodes.events():
                if source == "policy" and not found.is_set():
                    said += what
                    if said.endswith("</search>"):
                        found.set()
            return said

        assert asyncio.run(asyncio.wait_for(run(), 60)) == "".join(SCRIPTS["A"][0])
    assert asked.is_set()


def test_seeds_choose_the_random_numbers():
    """The same seed, the same numbers; each choice its own; without a seed always others."""
    made = noted()
    app = serve.create_app(made)

    async def run(**given):
        asked = openai_format.parse_request(body(**given), "tiny", 4)
        app.state.service.submit(asked, False)
        keys = [call["key"] for call in made.session.calls]
        made.session.calls.clear()
        app.state.service.open.clear()
        return keys

    one, again, other, free, freer = (
        asyncio.run(run(n=2, **given)) for given in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {}, {})
    )
    assert one == again
    assert len({*one, *other, *free, *freer}) == 8


def test_sampling_is_passed_on():
    made = noted()
    service = serve.Service(made, 1)
    given = {"temperature": 0.5, "top_p": 0.75, "top_k": 9}

    async def run(given):
        service.submit(openai_format.parse_request({"messages": body()["messages"]} | given, "tiny", 4), False)

    asyncio.run(run(given))
    asyncio.run(run({}))
    assert {key: made.session.calls[0][key] for key in given} == given
    assert {key: made.session.calls[1][key] for key in given} == {"temperature": 1, "top_p": 1, "top_k": 0}


# --------------------------------------------------------------------------------------------------------------- errors

USER = {"role": "user", "content": "A"}
REFUSED = [
    ({"stop": ["x"]}, 400, "stop", "stops at the tags"),
    ({"tools": [{}]}, 400, "tools", "retriever"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
    ({"logprobs": True}, 400, "logprobs", "not supported"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
    ({"reasoning_effort": "low"}, 400, "reasoning_effort", "not supported"),
    ({"min_p": 0.1}, 400, "min_p", "unknown"),
    ({"model": "gpt-4"}, 404, "model", "tiny"),
    ({"temperature": -1}, 400, "temperature", "from 0 to 2"),
    ({"temperature": "hot"}, 400, "temperature", "hot"),
    ({"temperature": True}, 400, "temperature", "True"),
    ({"top_p": 0}, 400, "top_p", "to 1"),
    ({"top_k": 1.5}, 400, "top_k", "whole number"),
    ({"seed": 2**64}, 400, "seed", "whole number"),
    ({"n": 0}, 400, "n", "from 1 to 4"),
    ({"n": 5}, 400, "n", "from 1 to 4"),
    ({"stream": 1}, 400, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options", "include_usage"),
    ({"max_tokens": 0}, 400, "max_tokens", "0"),
    ({"max_tokens": 500, "max_completion_tokens": 500}, 400, "max_tokens", "not both"),
    ({"messages": []}, 400, "messages", "at least one"),
    ({"messages": "A"}, 400, "messages", "list"),
    ({"messages": ["A"]}, 400, "messages", "messages[0]"),
    ({"messages": [{"role": "user"}]}, 400, "messages", "messages[0].content"),
    ({"messages": [{"role": "user", "content": " "}]}, 400, "messages", "not empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "text only"),
    ({"messages": [{"role": "tool", "content": "A"}]}, 400, "messages", "'tool'"),
    ({"messages": [USER, {"role": "assistant", "content": "B"}]}, 400, "messages", "the user's question"),
    ({"messages": [USER | {"tool_calls": [{}]}]}, 400, "messages", "tool_calls"),
    ({"messages": [{"role": "system", "content": "B"}, USER]}, 400, "messages", "no chat template"),
    ({"messages": [{"role": "user", "content": "A" * 255}]}, 400, "messages", "256 tokens"),
]  # fmt: skip


@pytest.mark.parametrize("given, status, param, words", REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_request_is_told_its_field(given, status, param, words):
    made = noted()
    done = post(serve.create_app(made), **given)
    error = done.json()["error"]
    assert (done.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert words in error["message"] and "code" in error
    assert not made.session.calls


def test_the_code_of_a_long_prompt_is_openais():
    error = post(serve.create_app(noted()), "A" * 300).json()["error"]
    assert error["code"] == "context_length_exceeded" and "301 tokens" in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_are_of_all_turns_together(scripted, name):
    """A searches with four tokens and answers with one."""
    whole = post(serve.create_app(scripted)).json()
    assert whole["usage"]["completion_tokens"] == 5
    assert post(serve.create_app(scripted), **{name: 5}).json()["choices"] == whole["choices"]
    for most in (1, 4):
        cut = post(serve.create_app(scripted), **{name: most}).json()
        (choice,) = cut["choices"]
        assert cut["usage"]["completion_tokens"] == most
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["parasearch"]["searches"] == 0  # no token would be left behind the documents


def test_what_changes_nothing_is_accepted(scripted):
    plain = post(serve.create_app(scripted)).json()["choices"]
    more = dict(user="me", metadata={"a": "b"}, store=True, n=1, seed=None, stop=None, frequency_penalty=0, tools=[])
    more |= dict(response_format={"type": "text"}, logit_bias={}, top_p=1, top_k=0, max_tokens=160, logprobs=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "A"}], "name": "me"}]
    done = post(serve.create_app(scripted), **more, messages=parts)
    assert done.status_code == 200 and done.json()["choices"] == plain


@pytest.mark.parametrize(
    "given, status, words",
    [
        ({"content": b"{"}, 400, "valid JSON"),
        ({"content": b"\xff"}, 400, "valid JSON"),
        ({"content": b"[" * 100_000}, 400, "valid JSON"),
        ({"content": b"[]"}, 400, "JSON object"),
        ({"content": json.dumps(body("\ud800"))}, 400, "Unicode"),
        ({"content": b" " * (serve.MAX_BODY + 1)}, 413, str(serve.MAX_BODY)),
    ],
    ids=["broken", "no UTF-8", "deep", "list", "half a pair", "long"],
)
def test_a_bad_body(given, status, words):
    done = call(serve.create_app(noted()), "POST", "/v1/chat/completions", **given)
    assert done.status_code == status and words in done.json()["error"]["message"]


def test_other_paths_and_methods_get_errors_in_the_same_form():
    app = serve.create_app(noted())
    for method, path, status in (("GET", "/v1/none", 404), ("GET", "/v1/chat/completions", 405)):
        done = call(app, method, path)
        assert done.status_code == status and path in done.json()["error"]["message"]


def test_models_and_health():
    app = serve.create_app(noted(), queue=5)
    assert [model["id"] for model in call(app, "GET", "/v1/models").json()["data"]] == ["tiny"]
    assert call(app, "GET", "/health").json() == {"status": "ok", "slots": 4, "open": 0, "queue": 5}


def test_more_than_slots_and_queue_are_sent_away():
    made = noted()
    app = serve.create_app(made, queue=1)

    async def run():
        request = openai_format.parse_request(body(n=4), "tiny", 4)
        app.state.service.submit(request, False)
        with pytest.raises(openai_format.ApiError, match="all 4 slots") as told:
            app.state.service.submit(request, False)
        assert told.value.status == 503 and len(made.session.calls) == 4

    asyncio.run(run())
    done = post(app, n=2)
    assert done.status_code == 503 and done.headers["retry-after"] == "1"
    made.session.futures[0].cancel()  # its loop is gone, so nobody is told
    app.state.service.open.discard(made.session.futures[0])

    async def after():
        app.state.service.submit(openai_format.parse_request(body(n=2), "tiny", 4), False)

    asyncio.run(after())
    assert len(made.session.calls) == 6


def test_a_server_that_shuts_down_takes_nothing_more():
    made = noted()
    app = serve.create_app(made)
    service = app.state.service

    async def run():
        request = openai_format.parse_request(body(), "tiny", 4)
        service.submit(request, False)
        service.cancel_all()
        with pytest.raises(openai_format.ApiError, match="shutting down"):
            service.submit(request, False)

    asyncio.run(run())
    assert [future.cancelled() for future in made.session.futures] == [True]


def test_an_engine_that_fails_is_told_and_seen():
    made = noted()
    app = serve.create_app(made)
    app.state.service.on_failure = lambda: failures.append(True)
    failures = []

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = [
                asyncio.ensure_future(client.post("/v1/chat/completions", json=body(stream=stream)))
                for stream in (False, True)
            ]
            while len(made.session.futures) < 2:
                await asyncio.sleep(0.001)
            for future in made.session.futures:
                future.set_exception(RuntimeError("out of memory"))
            return await asyncio.gather(*asked)

    plain, streamed = asyncio.run(asyncio.wait_for(run(), 30))
    assert plain.status_code == 500 and "out of memory" in plain.json()["error"]["message"]
    assert "out of memory" in events(streamed)[-1]["error"]["message"]
    health = call(app, "GET", "/health")
    assert health.status_code == 503 and "out of memory" in health.json()["error"]
    assert post(app).status_code == 503 and failures == [True]


# -------------------------------------------------------------------------------------------------- clients, the server


class Gate:
    """A retriever that answers when it is open; `asked` queries wait."""

    def __init__(self):
        self.open = threading.Event()
        self.retriever = Fake(self.wait)

    async def wait(self, query):
        while not self.open.is_set():
            await asyncio.sleep(0.002)


@contextlib.contextmanager
def listening(made, **given):
    """(address, server, its thread) of a real server over the agent."""
    server = serve.Server(serve.create_app(made, **given), log_level="critical")
    with serve.bound("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname(), server, thread
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def test_a_client_that_hangs_up_frees_its_slots(script):
    """With both kinds of answer; behind it the same slots serve others."""
    gate = Gate()
    with scripted_agent(script, gate.retriever) as made, listening(made, queue=0) as (address, server, _):
        service = server.config.app.state.service
        for i, stream in enumerate((False, True)):
            text = json.dumps(body(n=4, stream=stream)).encode()
            with socket.create_connection(address) as client:
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text)
                )
                client.sendall(text)
                wait_until(lambda i=i: len(gate.retriever.calls) == 8 * (i + 1))  # two sub-queries each
                assert len(service.open) == 4
            wait_until(lambda: not service.open)
        gate.open.set()
        url = f"http://{address[0]}:{address[1]}/v1/chat/completions"
        done = httpx.post(url, json=body(n=4), timeout=60).json()
        assert [choice["message"]["content"] for choice in done["choices"]] == ["yes-a"] * 4


def test_the_end_of_the_server_is_told_to_its_clients(script):
    gate = Gate()
    with scripted_agent(script, gate.retriever) as made, listening(made) as (address, server, thread):
        url, got = f"http://{address[0]}:{address[1]}/v1/chat/completions", {}

        def ask(stream):
            got[stream] = httpx.post(url, json=body(stream=stream), timeout=60)

        clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for client in clients:
            client.start()
        wait_until(lambda: len(gate.retriever.calls) == 4)
        server.handle_exit(signal.SIGTERM, None)
        for each in (*clients, thread):
            each.join(30)
            assert not each.is_alive()
    assert got[False].status_code == 503 and "shutting down" in got[False].json()["error"]["message"]
    assert "shutting down" in events(got[True])[-1]["error"]["message"]


def test_a_port_that_is_taken_is_told():
    with serve.bound("127.0.0.1", 0) as first:
        taken = serve.bound("127.0.0.1", first.getsockname()[1])
        with pytest.raises(UserError, match=r"--port=\d+.*in use"):
            taken.__enter__()


# --------------------------------------------------------------------------------------------------------- as a program


@pytest.mark.slow
def test_as_a_program(tmp_path):
    """A run is served by its directory alone, and SIGTERM ends the program in order."""
    config = parallel_tiny.get_config("smoke")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(resume.describe(config)))
    (tmp_path / "run" / "model").symlink_to(config.model.path)
    command = [sys.executable, "-m", "parasearch_jax.rollout.serve", f"--model={tmp_path / 'run'}", "--port=0"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as server:
        url = server.stdout.readline().split(" at ")[1].split(",")[0]
        question = json.loads(Path(config.data.test).read_text().splitlines()[0])
        done = httpx.post(f"{url}/chat/completions", json=body(question["question"]), timeout=120).json()
        assert done["choices"][0]["message"]["content"] in question["golden_answers"]
        assert done["model"] == "run" and done["choices"][0]["parasearch"]["searches"] == 1
        server.send_signal(signal.SIGTERM)
        told = server.communicate(timeout=60)[0]
    assert server.returncode == 0 and "Traceback" not in told


@pytest.mark.slow
def test_what_can_be_mended_is_one_line():
    for args, words in ((["--model=none", "--retriever={}"], "retriever.kind"), (["--model=none"], "--retriever")):
        command = [sys.executable, "-m", "parasearch_jax.rollout.serve", "--port=0", *args]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert words in done.stderr
