"""Public sets by name, against a mirror on this machine: which file of which commit is asked for, what is cached, what
is checked, and what is told where there is no network."""

import hashlib
import http.server
import json
import threading

import pytest
from huggingface_hub import constants

from parasearch_jax.data import hub, load_question_sets
from parasearch_jax.data.questions import public_sets, question_files, question_sets
from parasearch_jax.errors import UserError
from parasearch_jax.preflight import _questions
from parasearch_jax.resume import fingerprints

TYPES = {
    "hotpotqa/dev": {"comparison": 1_487, "bridge": 5_918},
    "2wikimultihopqa/dev": {
        "comparison": 3_040,
        "inference": 1_549,
        "compositional": 5_236,
        "bridge_comparison": 2_751,
    },
    "multihop_rag": {"comparison_query": 856, "inference_query": 816, "temporal_query": 583, "null_query": 301},
}


def content(public):
    """A file with as many rows as the set has, of the types that it has."""
    types = TYPES.get(public.name, {None: public.counts[""]})
    rows = [type for type, count in types.items() for _ in range(count)]
    if public.name == "multihop_rag":
        items = [{"query": f"{i}?", "answer": "x", "question_type": type} for i, type in enumerate(rows)]
        return json.dumps(items)
    lines = [{"id": f"dev_{i}", "question": f"{i}?", "golden_answers": ["x"]} for i in range(len(rows))]
    for line, type in zip(lines, rows, strict=True):
        line |= {"metadata": {"type": type}} if type else {}
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A hub that has every public set at its commit and nothing else; gives {path: number of downloads}."""
    files = {f"/datasets/{p.repo}/resolve/{p.revision}/{p.file}": p for p in hub.PUBLIC.values()}
    served = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            public = files.get(self.path)
            self.send_response(200 if public else 404)
            body = content(public).encode() if public else b""
            if public:
                self.send_header("X-Repo-Commit", public.revision)
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            return body

        def do_GET(self):
            body = self.do_HEAD()
            if self.path in files:  # the client asks for other things too
                served[self.path] = served.get(self.path, 0) + 1
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: server.serve_forever(0.05), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    server.shutdown()
    server.server_close()


def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_the_tables_are_those_of_the_papers():
    """Search-R1's seven test sets have 51,713 questions; HotpotQA's parallel and sequential ones are all of it."""
    tests = ("nq/test", "triviaqa/test", "popqa/test", "hotpotqa/dev", "2wikimultihopqa/dev", "musique/dev")
    assert sum(hub.PUBLIC[name].counts[""] for name in (*tests, "bamboogle/test")) == 51_713
    counts = hub.PUBLIC["hotpotqa/dev"].counts
    assert counts["parallel"] + counts["sequential"] == counts[""]


def test_a_set_is_fetched_once_and_then_read_offline(mirror, monkeypatch):
    questions = load_question_sets("nq/test")
    assert len(questions) == 3_610 and {(q.dataset, q.kind) for q in questions} == {("nq", "single")}
    path = f"/datasets/RUC-NLPIR/FlashRAG_datasets/resolve/{hub.FLASHRAG[1]}/nq/test.jsonl"
    assert mirror == {path: 1}
    offline(monkeypatch)
    assert load_question_sets("nq/test") == questions and mirror == {path: 1}


def test_the_subsets_of_table_5_by_name(mirror):
    spec = ",".join(f"{name}:{subset}" for name in TYPES for subset in ("parallel", "sequential"))
    counts = {}
    for question in load_question_sets(spec):
        counts[question.dataset, question.kind] = counts.get((question.dataset, question.kind), 0) + 1
    assert counts == {
        ("hotpotqa_parallel", "parallel"): 1_487,
        ("hotpotqa_sequential", "sequential"): 5_918,
        ("2wikimultihopqa_parallel", "parallel"): 3_040,
        ("2wikimultihopqa_sequential", "sequential"): 6_785,
        ("multihop_rag_parallel", "parallel"): 856,
        ("multihop_rag_sequential", "sequential"): 816,
    }


def test_other_subsets_are_as_large_as_they_are(mirror, monkeypatch):
    """The papers tell no number of the training sets' subsets."""
    monkeypatch.setitem(TYPES, "2wikimultihopqa/train", {"comparison": 5_000, "inference": 10_000})
    assert len(load_question_sets("2wikimultihopqa/train:parallel")) == 5_000
    with pytest.raises(UserError, match=r"nq/test\.jsonl:parallel: no question is of a type of that subset"):
        load_question_sets("nq/test:parallel")


def test_ids_and_names_of_several_sets(mirror):
    questions = load_question_sets("bamboogle/test,b=bamboogle/test")
    assert [(q.id, q.dataset) for q in questions[::125]] == [("bamboogle/dev_0", "bamboogle"), ("b/dev_0", "b")]
    assert load_question_sets("bamboogle/test")[0].id == "dev_0"
    named = load_question_sets("test=nq/test")
    assert {(q.dataset, q.kind) for q in named} == {("test", "single")}  # the kind is that of the set itself


@pytest.mark.parametrize("spec, told", [("hotpotqa/dev", "7404 .* 7405"), ("hotpotqa/dev:parallel", "1488 .* 1487")])
def test_another_count_than_the_papers_is_refused(mirror, monkeypatch, spec, told):
    moved = {"comparison": 1_488, "bridge": 5_917} if ":" in spec else {"comparison": 1_487, "bridge": 5_917}
    monkeypatch.setitem(TYPES, "hotpotqa/dev", moved)
    with pytest.raises(UserError, match=f"^{spec}: {told.split()[0]} questions, where {told.split()[-1]} are expected"):
        load_question_sets(spec)


def test_without_a_network_the_command_is_told(mirror, monkeypatch):
    offline(monkeypatch)
    command = r"hf download RUC-NLPIR/FlashRAG_datasets musique/dev\.jsonl --repo-type dataset --revision [0-9a-f]{40}"
    with pytest.raises(UserError, match=rf"questions musique/dev: .*HF_HUB_OFFLINE is set.*{command}"):
        load_question_sets("musique/dev")
    assert hub.lacks(hub.PUBLIC["musique/dev"]) and not mirror


def test_a_hub_that_is_not_there(mirror, monkeypatch):
    monkeypatch.setitem(hub.PUBLIC, "nq/test", hub.PublicSet("nq/test", *hub.FLASHRAG, "nq/none.jsonl", {"": 1}))
    with pytest.raises(UserError, match=r"nq/none\.jsonl of RUC-NLPIR/\w+@bcafb8dd.* can't be had \(.*NotFound"):
        load_question_sets("nq/test")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            "nq",
            "'nq' is neither a file .ending .jsonl or .json or .parquet. nor a public set: nq/train, nq/dev",
        ),
        ("hotpotqa/test", "'hotpotqa/test' is neither"),
        ("a.jsonl:single", "'a.jsonl:single' is neither"),
        ("nq/test,nq/dev", "'nq' stands for two files; give each a name"),
    ],
)
def test_names_that_are_none(spec, told):
    with pytest.raises(UserError, match=told):
        question_sets(spec)


def test_files_and_public_sets_are_told_apart():
    spec = "nq/train,mine=a.jsonl:parallel,hotpotqa/dev:sequential"
    assert [name for name, _ in question_files(spec)] == ["mine"]
    assert [public.name for public in public_sets(spec)] == ["nq/train", "hotpotqa/dev"]
    assert [each.label for each in question_sets(spec)] == ["nq", "mine", "hotpotqa_sequential"]


def test_a_run_knows_its_sets_by_their_commit(mirror, monkeypatch, config):
    """Nothing is fetched for it, and another commit is another run."""
    before = fingerprints(config("nq/test"))
    assert before["data.test"] != fingerprints(config("nq/dev"))["data.test"] and not mirror
    other = hub.PublicSet("nq/test", hub.FLASHRAG[0], "0" * 40, "nq/test.jsonl", {"": 1})
    monkeypatch.setitem(hub.PUBLIC, "nq/test", other)
    assert before["data.test"] != fingerprints(config("nq/test"))["data.test"]


def test_preflight_asks_for_it_only_where_there_is_no_network(mirror, monkeypatch, config):
    assert not list(_questions(config("nq/test,bamboogle/test")))
    load_question_sets("bamboogle/test")
    offline(monkeypatch)
    (lack,) = _questions(config("nq/test,bamboogle/test"))
    assert lack.leaf == "data.test" and "nq/test (HF_HUB_OFFLINE" in lack.text and "bamboogle" not in lack.text


@pytest.fixture
def config():
    import parallel_tiny

    def make(test):
        config = parallel_tiny.get_config("eval")
        config.data.test = test
        return config

    return make
