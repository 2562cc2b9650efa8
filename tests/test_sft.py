"""SFT end to end on a few stored episodes of the small world: what a run writes, that it learns what the policy said,
that a run stopped and continued is the run that was not, and what is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sft_tiny
from test_train_resume import content, crash

from parasearch_jax import compare, plan, rl, sft
from parasearch_jax.data import load_questions
from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model
from parasearch_jax.protocol import get_protocol
from parasearch_jax.retrieval import open_retriever
from parasearch_jax.rollout import Engine, RolloutConfig
from parasearch_jax.toy.files import DIRECTORY
from parasearch_jax.train import train
from parasearch_jax.writers import episode_record, read_metrics, write_episodes

ROOT = Path(__file__).parents[1]
SMALL = {"algorithm.questions": 4, "learner.micro_rows": 4, "train.steps": 4, "train.save_every": 2,
         "train.buckets": (128,), "optimizer.lr": 1e-3, "rollout.slots": 4,
         "rollout.max_total_tokens": 128}  # fmt: skip


def stored(question, answer=None):
    """A record in which everything is said at once; the retriever's document is anything."""
    texts = [
        ("prompt", f"Question: {question.text}\n"),
        ("policy", f"<think> Look it up.</think><search> {question.text}</search>"),
        ("docs", "\n\n<information>Doc 1(Title: x) Something.</information>\n\n"),
        ("policy", f"<think> There.</think><answer> {answer or question.golden_answers[0]}</answer>"),
    ]
    segments = [{"source": source, "text": text} for source, text in texts]
    return {"id": question.id, "question": question.text, "segments": segments}


def small(tmp_path, records=None, **leaves):
    """4 steps of 4 of 8 episodes, tested on 4 questions."""
    rows = (DIRECTORY / "test.jsonl").read_text().splitlines(keepends=True)[:4]
    (tmp_path / "test.jsonl").write_text("".join(rows))
    if records is None:
        records = [stored(question) for question in load_questions(DIRECTORY / "train.jsonl")[:8]]
    write_episodes(tmp_path / "good.jsonl", records)
    config = sft_tiny.get_config(f"episodes={tmp_path}/good.jsonl")
    config.data.test = str(tmp_path / "test.jsonl")
    config.update_from_flattened_dict(SMALL | leaves)
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("sft")
    config = small(tmp_path)
    return config, tmp_path / "work", sft.finetune(config, tmp_path / "work")


def test_work_directory_is_that_of_a_run(run, capsys, tmp_path):
    config, workdir, results = run
    assert json.loads((workdir / "results.json").read_text()) == json.loads(json.dumps(results))
    named = {key: results[key] for key in ("config", "method", "variant")}
    assert named == {"config": "sft_tiny", "method": "sft", "variant": None}
    assert set(results["evals"]) == {"initial", "final"} and results["evals"]["final"]["all"]["n"] == 4
    base, trained = load_model(config.model.path), load_model(workdir)
    assert np.abs(base.params["embed"] - trained.params["embed"]).max() > 0
    assert (workdir / "episodes.html").exists() and "Loss" in (workdir / "report.md").read_text()
    print(compare.table({"SFT": [workdir]}))  # and the plot has something to show of SFT alone
    compare.plot({"SFT": [read_metrics(workdir)]}, tmp_path / "curves.png")
    assert "| SFT work |" in capsys.readouterr().out and (tmp_path / "curves.png").stat().st_size > 5000


def test_it_learns_what_the_policy_said(run):
    """The same 4 of 8 in steps 1 and 2 as in 3 and 4, in another order: two epochs."""
    config, workdir, _ = run
    lines = read_metrics(workdir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and [line["epoch"] for line in lines] == [0.5, 1, 1.5, 2]
    assert lines[2]["loss"] + lines[3]["loss"] < 0.8 * (lines[0]["loss"] + lines[1]["loss"])
    model = load_model(config.model.path)
    texts = [s["text"] for record in sft.read_stored(config.data.episodes) for s in record["segments"]
             if s["source"] == "policy"]  # fmt: skip
    tokens = sum(len(ids) for ids in model.tokenizer(texts, add_special_tokens=False)["input_ids"])
    assert lines[0]["tokens/policy"] + lines[1]["tokens/policy"] == tokens
    assert lines[0]["tokens/read"] > lines[0]["tokens/policy"] and lines[0]["perplexity"] > 1
    assert (
        all(line["seconds/update"] > 0 for line in lines) and lines[3]["seconds/sync"] > lines[2]["seconds/sync"] == 0
    )


def mean_loss(config, *sources):
    """Of the stored episodes' tokens from these sources, by one full pass over each."""
    model, losses = load_model(config.model.path), []
    for record in sft.read_stored(config.data.episodes):
        texts = [("prompt", config.protocol.prompt.replace("{question}", record["question"]))]
        texts += [(s["source"], s["text"]) for s in record["segments"][1:]]
        encoded = [(source, model.tokenizer(text, add_special_tokens=False)["input_ids"]) for source, text in texts]
        ids = [i for _, part in encoded for i in part]
        logprobs = np.asarray(jax.nn.log_softmax(model.logits([ids], [len(ids)])[0]))
        counted = [source in sources for source, part in encoded for _ in part]
        losses += [-logprobs[t - 1, ids[t]] for t in range(1, len(ids)) if counted[t]]
    return np.mean(losses)


@pytest.mark.parametrize("mask, sources", [(True, ["policy"]), (False, ["policy", "docs", "notice"])])
def test_documents_are_learned_in_the_ablation_only(run, tmp_path, mask, sources):
    config = run[0].copy_and_resolve_references()
    leaves = {"train.steps": 1, "algorithm.questions": 8, "algorithm.mask_documents": mask}
    config.update_from_flattened_dict(leaves)
    sft.finetune(config, tmp_path / "work")
    (line,) = read_metrics(tmp_path / "work")
    assert line["loss"] == pytest.approx(mean_loss(config, *sources), rel=1e-4)


# -------------------------------------------------------------------------------------------------------------- resume


def stop(monkeypatch, at, how):
    """Calls `how()` when the batch of step `at` is drawn; once."""
    real, done = sft.draw, []

    def draw(rows, seed, step, count):
        if step == at - 1 and not done:
            done.append(step)
            how()
        return real(rows, seed, step, count)

    monkeypatch.setattr(sft, "draw", draw)


@pytest.mark.parametrize("at", [3, 4])
def test_four_steps_are_two_and_two(run, at, tmp_path, monkeypatch):
    """Stopped right behind the checkpoint, and with a step to undo."""
    config, workdir, results = run
    stop(monkeypatch, at, crash)
    with pytest.raises(RuntimeError, match="power"):
        sft.finetune(config, tmp_path / "work")
    assert len(read_metrics(tmp_path / "work")) == at - 1
    again = sft.finetune(config, tmp_path / "work")
    assert again["params_sha256"] == results["params_sha256"] and content(tmp_path / "work") == content(workdir)
    assert sft.finetune(config, tmp_path / "work") == json.loads(json.dumps(again))  # finished: nothing is done


def test_sigterm_saves_and_the_run_goes_on(run, tmp_path, monkeypatch):
    """It comes while step 4 is drawn: step 3, which no checkpoint holds, is saved."""
    config, workdir, results = run
    stop(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        sft.finetune(config, tmp_path / "work")
    assert ended.value.code == 143
    assert sorted(path.name for path in (tmp_path / "work" / "checkpoints").iterdir()) == ["2", "3"]
    again = sft.finetune(config, tmp_path / "work")
    assert again["params_sha256"] == results["params_sha256"] and content(tmp_path / "work") == content(workdir)


def test_other_episodes_under_the_same_name_are_refused(run, tmp_path):
    config, workdir, _ = run
    path = Path(config.data.episodes)
    text = path.read_text()
    path.write_text(text + text.splitlines(keepends=True)[0])
    try:
        with pytest.raises(UserError, match=r"data\.episodes: the content has changed"):
            sft.finetune(config, workdir)
    finally:
        path.write_text(text)


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.fixture(scope="module")
def engine(run):
    config, _, _ = run
    engine = Engine(load_model(config.model.path), RolloutConfig(**config.rollout, topk=1))
    yield engine
    engine.close()


PROTOCOL = get_protocol("parallel", prompt="Question: {question}\n")


def to_row(*args):
    return rl.make_row(sft.to_episode(*args), ({}, ()))


def test_a_row_is_what_the_rollout_had(engine):
    """Ids and mask of sampled episodes, stored without ids and read back: the model spells as its tokenizer does."""
    questions = load_questions(DIRECTORY / "train.jsonl")[:4]
    retriever = open_retriever(sft_tiny.get_config().retriever)
    episodes = engine.rollout(questions, PROTOCOL, retriever, temperature=0.0)
    retriever.close_sync()
    for episode, question in zip(episodes, questions, strict=True):
        row = to_row(json.loads(json.dumps(episode_record(episode, question))), engine, PROTOCOL)
        assert row.ids.tolist() == [i for segment in episode.segments for i in segment.ids]
        assert row.policy_mask.tolist() == [s.source == "policy" for s in episode.segments for _ in s.ids]
        assert row.question_id == question.id and not row.rewards.any() and not row.truncated


def test_the_prompt_is_the_one_that_this_model_gets(engine, monkeypatch):
    record = stored(load_questions(DIRECTORY / "train.jsonl")[0])
    row = to_row(record, engine, PROTOCOL)
    record["segments"][0]["text"] = "Answer with tags, as in these examples: ..."
    other = to_row(record | {"stop_reason": "length"}, engine, PROTOCOL)
    episode = sft.to_episode(record, engine, PROTOCOL)
    assert other.ids.tolist() == row.ids.tolist() and other.truncated
    assert "1 were stored under another prompt" in sft._describe([row], [record], [episode], 1, 1)
    monkeypatch.setattr(engine.tokenizer, "chat_template", "<{{ messages[0].content }}>", raising=False)
    chat = to_row(record, engine, PROTOCOL)
    assert engine.decode(chat.ids.tolist()).startswith(f"<Question: {record['question']}\n><think>")


# -------------------------------------------------------------------------------------------------------------- errors

BAD = {
    "no file": ({"data.episodes": "none.jsonl"}, r"no stored episodes 'none.jsonl'.*--sample"),
    "more a step than there are": ({"algorithm.questions": 9}, "algorithm.questions is 9, but data.episodes hold 8"),
    "longer than the buckets": (
        {"train.buckets": (32,)},
        "8 of 8 episodes .* longer than .* 32 tokens; the longest has",
    ),
    "samples": ({"algorithm.samples": 8}, "algorithm.samples is 8, which sft has not"),
    "a KL": ({"learner.kl_coef": 0.1}, "kl_coef is 0.1, which a supervised loss has not"),
    "a measure that is none": ({"train.best": "loss"}, "train.best is 'loss'"),
    "documents in the prompt": (
        {"protocol.name": "rag", "protocol.prompt": "{documents}{question}"},
        "protocol 'rag' has documents in its prompt",
    ),
    "a profile of no step": ({"profile": 9}, "--profile is 9"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_told(tmp_path, name):
    leaves, told = BAD[name]
    config = small(tmp_path, **{leaf: value for leaf, value in leaves.items() if leaf != "profile"})
    with pytest.raises(UserError, match=told):
        sft.finetune(config, tmp_path / "work", leaves.get("profile"))
    assert not (tmp_path / "work" / "metrics.jsonl").exists() or not read_metrics(tmp_path / "work")


def test_episodes_of_the_test_set_are_refused(tmp_path):
    """As a pattern over all of a run's episodes would bring; the data set's name in front of an id hides nothing."""
    records = [stored(question) for question in load_questions(DIRECTORY / "train.jsonl")[:7]]
    records.append(stored(load_questions(DIRECTORY / "test.jsonl")[0]))
    records[-1]["id"] = f"toy/{records[-1]['id']}"
    with pytest.raises(UserError, match=r"1 of the 8 episodes in data\.episodes answer questions of data\.test"):
        sft.finetune(small(tmp_path, records), tmp_path / "work")


def test_the_loop_of_rl_and_the_plan_refuse_it(tmp_path):
    config = small(tmp_path)
    with pytest.raises(UserError, match=r"call parasearch_jax\.sft\.finetune"):
        train(config, workdir=tmp_path / "work")
    with pytest.raises(UserError, match="--plan knows no sft"):
        plan.print_plan(config)


# ---------------------------------------------------------------------------------------------------------- the command


def launch(*args):
    command = [sys.executable, "launch.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_two_hosts_learn_like_one(run, tmp_path):
    """A process of one device each, started by the command."""
    config, workdir, _ = run
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"--coordinator=127.0.0.1:{free.getsockname()[1]}", "--num_processes=2", "--config.mesh.fsdp=2"
    named = f"--config=configs/sft_tiny.py:episodes={config.data.episodes}", f"--config.data.test={config.data.test}"
    flags = [f"--config.{leaf}={value}" for leaf, value in SMALL.items()]
    command = [sys.executable, "launch.py", *named, *flags, *place, f"--workdir={tmp_path}/work"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    both = [subprocess.Popen([*command, f"--process_id={i}"], cwd=ROOT, env=env) for i in (0, 1)]
    assert [process.wait(300) for process in both] == [0, 0]
    got, want = (read_metrics(path) for path in (tmp_path / "work", workdir))
    for a, b in zip(got, want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4) and a["tokens/read"] == b["tokens/read"]
    assert (tmp_path / "work" / "results.json").exists()


@pytest.mark.slow
def test_sample_reject_learn(tmp_path):
    """The three commands of the documentation, in short; the first is interrupted and goes on."""
    small(tmp_path)  # writes test questions
    pattern, out = f"{tmp_path}/sampled/episodes/*.jsonl", tmp_path / "chosen.jsonl"
    leaves = "--config.algorithm.questions=8", "--config.algorithm.samples=4", "--config.rollout.slots=32"
    sampling = "--config=configs/parallel_tiny.py", "--sample", f"--workdir={tmp_path}/sampled", *leaves
    assert launch(*sampling, "--config.train.steps=1").returncode == 0
    (first,) = (tmp_path / "sampled" / "episodes").iterdir()
    written = first.stat().st_mtime_ns
    done = launch(*sampling, "--config.train.steps=2")
    assert done.returncode == 0 and "1 of 2 steps are left" in done.stdout and first.stat().st_mtime_ns == written
    records = sft.read_stored(pattern)
    assert len(records) == 64 and len({record["id"] for record in records}) == 16
    other = launch(*sampling, "--config.train.steps=2", "--config.seed=1")
    assert other.returncode != 0 and "seed: 0 there, 1 now" in other.stderr

    command = [sys.executable, "-m", "parasearch_jax.reject", f"--episodes={pattern}", f"--out={out}"]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0
    leaves = "--config.algorithm.questions=4", "--config.train.steps=2", f"--config.data.test={tmp_path}/test.jsonl"
    done = launch(f"--config=configs/sft_tiny.py:episodes={out}", f"--workdir={tmp_path}/work", *leaves)
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(tmp_path / "work")) == 2 and (tmp_path / "work" / "results.json").exists()
    done = launch(*sampling[:2], f"--workdir={tmp_path}/work")
    assert done.returncode != 0 and "belongs to another run" in done.stderr
