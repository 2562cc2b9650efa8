"""The judge: what is asked and asked again, what is kept on disk, verdicts, and the agreement by hand; also our own
serve command as the judge."""

import contextlib
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from rollout.scripted import PROTOCOL, Fake, scripted_model

from parasearch_jax.data import judge as judging
from parasearch_jax.data.judge import Endpoint, ask, fill, judge, read_prompt, summarize, verdict
from parasearch_jax.endpoint import Server, address, bound
from parasearch_jax.errors import UserError
from parasearch_jax.rollout import Engine, RolloutConfig, agent, serve
from parasearch_jax.sharding.mesh import MeshConfig

ROOT = Path(__file__).parents[2]


def record(name, answer, golds=("Ann",), **more):
    segments = [{"source": "prompt", "text": "?"}, {"source": "policy", "text": "x"}]
    row = {"id": name, "question": f"who is {name}?", "golden_answers": list(golds), "answer": answer}
    return row | {"kind": "single", "dataset": "nq", "sample": 0, "segments": segments} | more


@contextlib.contextmanager
def server(replies):
    """An endpoint that gives `replies` one after the other: a text, or (status, headers, body). Yields its URL and the
    requests that it got."""
    got, left = [], iter(replies)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((self.path, self.headers.get("Authorization"), body))
            reply = next(left)
            if isinstance(reply, str):
                reply = 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
            status, headers, text = reply
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: made.serve_forever(0.05), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}/v1", got
    finally:
        made.shutdown()
        made.server_close()


def endpoint(url, **more):
    return Endpoint(url, "m", **({"backoff": 0.001, "longest_backoff": 0.01, "tries": 4} | more))


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("True", True),
        ("false.", False),
        ("**True**", True),
        ("The predicted answer is False", False),
        ("True, as false friends go", True),
        ("It is true that this is false", None),
        ("untrue", None),
        ("", None),
        ("Yes", None),
    ],
)
def test_verdicts(reply, expected):
    assert verdict(reply) is expected


def test_a_request_is_a_chat_completion():
    with server(["True"]) as (url, got), httpx.Client() as client:
        assert ask(client, endpoint(f"{url}/", key="k"), "right?") == "True"
    ((path, key, body),) = got
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    messages = [{"role": "user", "content": "right?"}]
    assert body == {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 1024}


def test_what_may_pass_is_asked_again():
    busy = [(429, {"Retry-After": "0"}, "slow down"), (503, {}, "loading"), "False"]
    with server(busy) as (url, got), httpx.Client() as client:
        assert ask(client, endpoint(url), "?") == "False" and len(got) == 3
        assert got[0][1] is None  # no key, no header


@pytest.mark.parametrize(
    ("replies", "told", "requests"),
    [
        ([(500, {}, "oom")] * 9, r"gave no judgement in 4 tries .status 500: oom.; the same command goes on", 4),
        ([(401, {}, "bad key")], r"refuses to judge .status 401: bad key.; see --url, --model and OPENAI_API_KEY", 1),
        ([(404, {}, "no such model")], "refuses to judge .status 404: no such model", 1),
        ([(200, {}, "<html>")], "answers with no chat completion: '<html>'; see --url", 1),
        ([(200, {}, '{"choices": []}')], "answers with no chat completion", 1),
    ],
)
def test_what_will_not_pass_is_told(replies, told, requests):
    with server(replies) as (url, got), httpx.Client() as client:
        with pytest.raises(UserError, match=told):
            ask(client, endpoint(url), "?")
        assert len(got) == requests


def test_nobody_listens():
    with httpx.Client() as client, pytest.raises(UserError, match=r"gave no judgement in 4 tries .ConnectError"):
        ask(client, endpoint("http://127.0.0.1:9/v1"), "?")


# ------------------------------------------------------------------------------------------------------- all of them


def test_fields_go_into_the_prompt_once():
    row = record("x", "{question} \\1", golds=("A", "B"))
    assert fill("{answer}|{golden_answers}|{question}|{other}", row) == "{question} \\1|A | B|who is x?|{other}"
    for text in ("who is x?", "A | B", "{question} \\1"):
        assert text in fill(judging.PROMPT, row)


class Asked(list):
    """A judge that says True to Ann, and keeps what it was asked."""

    def __call__(self, prompt):
        self.append(prompt)
        return "True" if "Ann" in prompt.rpartition("Predicted answer:")[2] else "False"


RECORDS = [record("a", "Ann"), record("b", "Bob"), record("c", None), record("d", " "), record("a", "Ann", sample=1)]


def test_rows_are_in_order_and_asked_for_once(tmp_path):
    asked, out = Asked(), tmp_path / "new" / "judged.jsonl"
    rows = judge(RECORDS, asked, out, "m")
    assert [(row["id"], row["sample"], row["verdict"]) for row in rows] == [
        ("a", 0, True), ("b", 0, False), ("c", 0, None), ("d", 0, None), ("a", 1, True)]  # fmt: skip
    assert len(asked) == 2  # the samples of a say the same, c and d nothing
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    assert judge(RECORDS, asked, out, "m") == rows and len(asked) == 2


def test_another_model_or_prompt_asks_anew_and_what_is_known_stays(tmp_path):
    asked, out = Asked(), tmp_path / "judged.jsonl"
    judge(RECORDS, asked, out, "m")
    judge(RECORDS, asked, out, "other")
    judge(RECORDS, asked, out, "m", prompt="{question} {golden_answers} Predicted answer: {answer}")
    assert len(asked) == 6
    judge(RECORDS, asked, out, "other")
    judge(RECORDS, asked, out, "m")
    assert len(asked) == 6


def test_a_failure_keeps_what_was_judged(tmp_path):
    out, records = tmp_path / "judged.jsonl", [record(str(i), "Ann") for i in range(20)]

    def failing(prompt):
        if "who is 11?" in prompt:
            raise UserError("away")
        return "True"

    with pytest.raises(UserError, match="away"):
        judge(records, failing, out, "m", connections=1)
    assert len(out.read_text().splitlines()) == 11
    with out.open("a") as file:
        file.write('{"key": "cut o')  # as a kill leaves it
    asked = Asked()
    rows = judge(records, asked, out, "m", connections=1)
    assert len(asked) == 9 and len(rows) == 20 == len(out.read_text().splitlines())


def test_a_file_of_something_else_is_not_written_over(tmp_path):
    out = tmp_path / "judged.jsonl"
    out.write_text('{"id": "x"}\n{"id": "y"}\n')
    with pytest.raises(UserError, match=r"judged\.jsonl, line 1 is no judgement .* give another --out"):
        judge(RECORDS, Asked(), out, "m")
    assert out.read_text() == '{"id": "x"}\n{"id": "y"}\n'


def row(verdict, answer, reply="x", **more):
    return record(more.pop("name", answer or "-"), answer) | {"verdict": verdict, "reply": reply} | more


def test_numbers_by_hand():
    """EM has 2 right, the judge 3; cover-EM has 3. Kappa of judge and EM: (4/6 - 1/2) / (1/2)."""
    rows = [
        row(True, "Ann"),
        row(True, "Ann Lee"),  # EM says no, cover-EM yes
        row(True, "Anne", dataset="", kind="parallel"),
        row(False, "the Ann"),  # EM says yes
        row(None, "Bob", reply="Perhaps"),
        row(None, None, reply=None),
    ]
    found = summarize(rows)
    assert (found["n"], found["acc_l"], found["unclear"], found["no_answer"]) == (6, 0.5, 1, 1)
    assert found["acc_l_ci"][0] < 0.5 < found["acc_l_ci"][1]
    assert {name: (each["n"], each["acc_l"]) for name, each in found["subsets"].items()} == {
        "single": (5, 0.4), "nq": (5, 0.4), "parallel": (1, 1.0)}  # fmt: skip
    em, cover = found["agreement"]["em"], found["agreement"]["cover_em"]
    assert {key: em[key] for key in ("both", "judge_only", "metric_only", "neither")} == {
        "both": 1, "judge_only": 2, "metric_only": 1, "neither": 2}  # fmt: skip
    assert em["agreement"] == 0.5 and em["kappa"] == pytest.approx(0.0)
    assert cover["both"] == 2 and cover["agreement"] == pytest.approx(4 / 6)
    assert cover["kappa"] == pytest.approx((4 / 6 - 1 / 2) / (1 / 2))
    assert "f1" not in found["agreement"]
    told = judging.describe(found)
    assert "| all | 6 | 50.0 |" in told and "1 without an answer, 1 unclear replies" in told


def test_prompts_of_ones_own(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("{question} {answer}")
    with pytest.raises(UserError, match=r"lacks \{golden_answers\}, where"):
        read_prompt(str(path))
    with pytest.raises(UserError, match="can't be read"):
        read_prompt(str(tmp_path / "none.txt"))
    assert read_prompt("") == judging.PROMPT


# ------------------------------------------------------------------------------------------------------- the command


def command(tmp_path, url, *args):
    episodes = tmp_path / "final.jsonl"
    episodes.write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    line = [sys.executable, "-m", "parasearch_jax.data.judge", f"--episodes={episodes}", f"--url={url}", "--model=tiny"]
    return subprocess.run([*line, *args], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_command(tmp_path):
    out = tmp_path / "judged.jsonl"
    with server(["True", "False"]) as (url, got):
        done = command(tmp_path, url, f"--out={out}", "--connections=1")
        again = command(tmp_path, url, f"--out={out}", "--connections=1")
        assert done.returncode == again.returncode == 0, done.stderr
        assert len(got) == 2 and again.stdout == done.stdout
    assert "| all | 5 | 40.0 |" in done.stdout and "2 without an answer, 0 unclear" in done.stdout
    found = json.loads((tmp_path / "judged.json").read_text())
    assert found["model"] == "tiny" and found["acc_l"] == 0.4 and found["agreement"]["em"]["agreement"] == 1.0


@pytest.mark.parametrize(
    ("url", "out", "told"),
    [
        ("http://127.0.0.1:9/v1", "final.jsonl", "is one of the files that --episodes names"),
        ("http://127.0.0.1:9/v1", "judged.json", "has to end in .jsonl"),
        ("127.0.0.1:9/v1", "judged.jsonl", "has to begin with http://"),
    ],
)
def test_command_that_can_not_be_done_is_one_line(tmp_path, url, out, told):
    done = command(tmp_path, url, f"--out={tmp_path}/{out}")
    assert done.returncode != 0 and "Traceback" not in done.stderr and told in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["final.jsonl"]


def test_our_own_endpoint_judges(tmp_path):
    """A scripted model that says True where it reads an R, and False where it reads a W."""
    script = scripted_model({"R": [["<answer>True</answer>"]], "W": [["<answer>False</answer>"]]})
    limits = dict(slots=4, chunk=4, max_turns=3, max_turn_tokens=40, max_total_tokens=256, observation_tokens=200)
    config = RolloutConfig(**limits, topk=1, deterministic=False)
    settings = agent.Settings(
        name="tiny",
        model="",
        dtype="float32",
        protocol=PROTOCOL,
        retriever={},
        rollout=config,
        seed=0,
        mesh=MeshConfig(),
    )
    engine = Engine(script, config)
    with engine.session(PROTOCOL, Fake()) as session, bound("127.0.0.1", 0) as listener:
        made = Server(serve.create_app(agent.Agent(settings, engine.tokenizer, session)), log_level="error")
        thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            to = Endpoint(f"{address('127.0.0.1', listener)}/v1", "tiny")
            records = [record("x", "R"), record("y", "W"), record("z", "R again")]
            with httpx.Client() as client:
                prompt = "{question} {golden_answers} {answer}"
                rows = judge(records, lambda text: ask(client, to, text), tmp_path / "judged.jsonl", "tiny", prompt)
        finally:
            made.should_exit = True
            thread.join(30)
    engine.close()
    assert [row["verdict"] for row in rows] == [True, False, True]
