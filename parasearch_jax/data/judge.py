r"""ACC_L: the share of stored answers that a language model judges right, and how far it agrees with EM and cover-EM.

    python -m parasearch_jax.data.judge --episodes=runs/a/episodes/final.jsonl --url=http://127.0.0.1:8000/v1 \
        --model=NAME --out=runs/a/judged.jsonl

Any OpenAI-compatible endpoint judges: a provider's, vLLM's, llama.cpp's, or `python -m parasearch_jax.rollout.serve`.
OPENAI_API_KEY, where set, is sent as the bearer token. --prompt is a file with {question}, {golden_answers} and
{answer}; without it the prompt is PROMPT below. R1-Searcher asks for "True" or "False" too, of gpt-4o-mini (arXiv
2503.05592, `metric_calc_gpt_as_judge.py`); the words here are ours.

Each answer is asked about once, at temperature 0; the replies lie in --out, written as they come. The same command asks
only for what it lacks: another model or prompt asks anew, and the same answer to the same question is never asked about
twice. An episode without an answer is wrong and not asked about. A reply that is neither "True" nor "False" is unclear:
counted, and no right answer.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from absl import app, flags

from parasearch_jax.data.answers import NORMALIZERS, answer_metrics
from parasearch_jax.data.statistics import kappa, ratio_intervals
from parasearch_jax.errors import UserError
from parasearch_jax.stored import episode_files, read_stored, to_question
from parasearch_jax.writers import write_episodes, write_json

PROMPT = """\
You are given a question, its reference answers and a predicted answer. Judge whether the predicted answer is right: \
whether it means the same as one of the reference answers. Spelling, order and further words that do not contradict it \
do not matter.

Question: {question}
Reference answers: {golden_answers}
Predicted answer: {answer}

Reply with one word: True if the predicted answer is right, False if it is not.
"""
FIELDS = ("question", "golden_answers", "answer")
MAX_TOKENS = 1024  # as R1-Searcher's; a model may think first
AWAY = (408, 409, 429, 500, 502, 503, 504)  # statuses that another try may mend


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where to ask. Times in seconds."""

    url: str  # with /v1
    model: str
    key: str = ""
    tries: int = 6
    backoff: float = 0.5  # before the second try, twice as long before each further one
    longest_backoff: float = 30.0
    timeout: float = 120.0


def ask(client: httpx.Client, endpoint: Endpoint, prompt: str) -> str:
    """The reply to a prompt.

    Tried again, with growing pauses or as `Retry-After` says: no connection, no answer in time, and AWAY. Raises
    UserError with what the server said when the tries are used up, and at once for other statuses and for an answer
    that is no chat completion.
    """
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}
    body |= {"temperature": 0, "max_tokens": MAX_TOKENS}
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    url, told, pause = endpoint.url.rstrip("/") + "/chat/completions", "", 0.0
    for attempt in range(endpoint.tries):
        time.sleep(pause)
        pause = min(endpoint.backoff * 2**attempt * random.uniform(1, 1.5), endpoint.longest_backoff)
        try:
            response = client.post(url, json=body, headers=headers, timeout=endpoint.timeout)
        except httpx.TransportError as error:
            told = f"{type(error).__name__}: {error}"
            continue
        if response.status_code == 200:
            return _reply(response, url)
        told = f"status {response.status_code}: {' '.join(response.text.split())[:300]}"
        if response.status_code not in AWAY:
            raise UserError(f"{url} refuses to judge ({told}); see --url, --model and OPENAI_API_KEY")
        pause = _retry_after(response, pause, endpoint.longest_backoff)
    raise UserError(f"{url} gave no judgement in {endpoint.tries} tries ({told}); the same command goes on from here")


def _reply(response: httpx.Response, url: str) -> str:
    try:
        return str(response.json()["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{url} answers with no chat completion: {response.text[:200]!r}; see --url") from None


def _retry_after(response: httpx.Response, pause: float, longest: float) -> float:
    try:
        return min(max(float(response.headers.get("Retry-After", "")), 0.0), longest)
    except ValueError:  # absent, or a date
        return pause


def verdict(reply: str) -> bool | None:
    """True, False or None (unclear): the reply's first word, else the only one of the two words in it.

    "True." "false" "The answer is **True**" -> True, False, True; "It is true that this is false" -> None
    """
    words = re.findall(r"[a-z]+", reply.lower())
    if words[:1] in (["true"], ["false"]):
        return words[0] == "true"
    found = {"true", "false"} & set(words)
    return found == {"true"} if len(found) == 1 else None


def fill(prompt: str, record: Mapping) -> str:
    """The prompt with the fields of an episode. What stands in these is not filled in again."""
    golds = " | ".join(to_question(record).golden_answers)
    values = {"question": record["question"], "golden_answers": golds, "answer": record["answer"]}
    return re.sub(r"\{(" + "|".join(FIELDS) + r")\}", lambda match: values[match[1]], prompt)


# ---------------------------------------------------------------------------------------------------------- all of them


def judge(
    records: Sequence[Mapping], asking: Callable[[str], str], out: Path, model: str, prompt: str = PROMPT, connections=8
) -> list[dict]:
    """A row for each of the stored episodes `records`, in order: its id, question, answer, "reply" and "verdict".

    `asking(prompt)` gives a reply; `connections` are asked for at once. Replies that `out` holds are taken from there,
    and new ones are added to it as they come; in the end it holds the rows. Raises what `asking` raises, with all
    replies until then kept.
    """
    keys = [_key(model, fill(prompt, record)) if _given(record) else "" for record in records]
    known = _read_replies(out)
    wanted = {key: fill(prompt, record) for key, record in zip(keys, records, strict=True) if key and key not in known}
    write_episodes(out, _replies(known))  # whole lines, where a kill may have left half of one
    known |= _ask_all(wanted, asking, out, connections)
    rows = [_row(record, key, known.get(key)) for record, key in zip(records, keys, strict=True)]
    used = set(keys)
    others = {key: reply for key, reply in known.items() if key not in used}  # of other models and prompts
    write_episodes(out, [*rows, *_replies(others)])
    return rows


def _ask_all(wanted: Mapping[str, str], asking: Callable[[str], str], out: Path, connections: int) -> dict[str, str]:
    """{key: reply} of `wanted`, {key: prompt}; each is written as it comes. After an error no more are asked."""
    found: dict[str, str] = {}
    lock, ended = threading.Lock(), threading.Event()
    with out.open("a", encoding="utf-8") as file, concurrent.futures.ThreadPoolExecutor(connections) as pool:

        def one(key: str, prompt: str) -> None:
            if ended.is_set():
                return
            try:
                found[key] = asking(prompt)
            except BaseException:
                ended.set()
                raise
            with lock:
                file.write(json.dumps({"key": key, "reply": found[key]}) + "\n")
                file.flush()

        futures = [pool.submit(one, *item) for item in wanted.items()]
        try:
            for future in futures:
                future.result()
        finally:  # also on Ctrl-C
            ended.set()
    return found


def _replies(known: Mapping[str, str]) -> list[dict]:
    return [{"key": key, "reply": reply} for key, reply in known.items()]


def _given(record: Mapping) -> bool:
    if "answer" not in record:
        raise UserError(
            f"the stored episode of {record['id']!r} has no 'answer': take an evaluation's, episodes/final.jsonl"
        )
    return bool((record["answer"] or "").strip())


def _key(model: str, prompt: str) -> str:
    return hashlib.sha256(f"{model}\n{MAX_TOKENS}\n{prompt}".encode(errors="replace")).hexdigest()


def _row(record: Mapping, key: str, reply: str | None) -> dict[str, Any]:
    fields = {
        name: record.get(name) for name in ("id", "question", "golden_answers", "dataset", "kind", "sample", "answer")
    }
    return {**fields, "key": key, "reply": reply, "verdict": None if reply is None else verdict(reply)}


def _read_replies(path: Path) -> dict[str, str]:
    """{key: reply} of an earlier start. A last line that a kill cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["key"] and row["reply"] is not None:
                known[row["key"]] = row["reply"]
        except (ValueError, LookupError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}, line {number} is no judgement ({line[:60]!r}): give another --out") from None
    return known


def summarize(rows: Sequence[Mapping], normalizer: str = "squad") -> dict[str, Any]:
    """ACC_L of the judged rows, of all and of each data set and kind, and the agreement with the answer metrics.

    {"n", "acc_l", "acc_l_ci", "unclear", "no_answer", "subsets": {name: {"n", "acc_l", "acc_l_ci"}}, "agreement":
    {metric: {"both", "judge_only", "metric_only", "neither", "agreement", "kappa"}}}. Shares in [0, 1]; intervals 95 %,
    percentile bootstrap over questions; the metrics' F1 is left out, being no yes or no.
    """
    right = np.array([row["verdict"] is True for row in rows])
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        for name in filter(None, (row.get("kind"), row.get("dataset"))):
            members.setdefault(name, []).append(i)
    agreement = {}
    for name, metric in answer_metrics(normalizer).items():
        if name != "f1":
            scored = np.array([metric(row["answer"], row["golden_answers"]) == 1 for row in rows])
            agreement[name] = _agreement(right, scored)
    return {
        "n": len(rows),
        **_share(rows, right, range(len(rows))),
        "unclear": sum(row["reply"] is not None and row["verdict"] is None for row in rows),
        "no_answer": sum(row["reply"] is None for row in rows),
        "subsets": {name: {"n": len(of)} | _share(rows, right, of) for name, of in members.items()},
        "agreement": agreement,
    }


def _share(rows: Sequence[Mapping], right: np.ndarray, of: Sequence[int]) -> dict[str, Any]:
    questions = {key: i for i, key in enumerate(dict.fromkeys((rows[i]["id"], rows[i]["question"]) for i in of))}
    sums = np.zeros((len(questions), 2))
    for i in of:
        sums[questions[rows[i]["id"], rows[i]["question"]]] += (right[i], 1)
    low, high = ratio_intervals(sums[:, :1], sums[:, 1:])[:, 0].tolist()
    return {"acc_l": float(sums[:, 0].sum() / sums[:, 1].sum()), "acc_l_ci": [low, high]}


def _agreement(judged: np.ndarray, scored: np.ndarray) -> dict[str, float]:
    counts = {"both": judged & scored, "judge_only": judged & ~scored, "metric_only": ~judged & scored}
    out = {name: int(found.sum()) for name, found in (counts | {"neither": ~judged & ~scored}).items()}
    return out | {"agreement": float((judged == scored).mean()), "kappa": kappa(judged, scored)}


def describe(found: Mapping[str, Any]) -> str:
    """The lines of the command."""
    lines = ["| answers | n | ACC_L % | 95 % |", "|---|---:|---:|---|"]
    for name, row in {"all": found, **found["subsets"]}.items():
        low, high = (100 * end for end in row["acc_l_ci"])
        lines.append(f"| {name} | {row['n']} | {100 * row['acc_l']:.1f} | {low:.1f} to {high:.1f} |")
    lines.append(f"\n{found['no_answer']} without an answer, {found['unclear']} unclear replies: counted as wrong\n")
    lines += [
        "| judge against | both right | judge alone | metric alone | neither | agree % | kappa |",
        "|---" + "|---:" * 6 + "|",
    ]
    for name, row in found["agreement"].items():
        counts = " | ".join(str(row[key]) for key in ("both", "judge_only", "metric_only", "neither"))
        lines.append(f"| {name} | {counts} | {100 * row['agreement']:.1f} | {row['kappa']:.3f} |")
    return "\n".join(lines)


def read_prompt(path: str) -> str:
    """The user's prompt; PROMPT for "". Raises UserError if it can't be read or lacks a field."""
    if not path:
        return PROMPT
    try:
        prompt = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt={path} can't be read: {error}") from error
    if missing := [f"{{{field}}}" for field in FIELDS if f"{{{field}}}" not in prompt]:
        raise UserError(f"--prompt={path} lacks {', '.join(missing)}, where the episode's fields go")
    return prompt


def main(argv: Sequence[str]) -> None:
    given = flags.FLAGS
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}: put a pattern in quotes, --episodes='DIR/*.jsonl'")
    if not re.match("https?://", given.url):
        raise UserError(f"--url={given.url} has to begin with http:// or https://, as in http://127.0.0.1:8000/v1")
    out, prompt = Path(given.out), read_prompt(given.prompt)
    if out.suffix != ".jsonl":
        raise UserError(f"--out={out} has to end in .jsonl: the numbers go beside it as .json")
    if out.resolve() in [path.resolve() for path in episode_files(given.episodes)]:
        raise UserError(f"--out={out} is one of the files that --episodes names: give another")
    records = read_stored(given.episodes)
    endpoint = Endpoint(given.url, given.model, os.environ.get("OPENAI_API_KEY", ""))
    with httpx.Client() as client:
        rows = judge(records, lambda text: ask(client, endpoint, text), out, given.model, prompt, given.connections)
    found = {"model": given.model, "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest()}
    found |= {"normalizer": given.normalizer} | summarize(rows, given.normalizer)
    write_json(out.with_suffix(".json"), found)
    print(f"{describe(found)}\n\nwritten: {out} and {out.with_suffix('.json')}")


if __name__ == "__main__":
    flags.DEFINE_string("episodes", None, "Stored episodes: files or patterns, with commas.", required=True)
    flags.DEFINE_string("url", None, "OpenAI-compatible endpoint: http://127.0.0.1:8000/v1", required=True)
    flags.DEFINE_string("model", None, "Name of the judging model there.", required=True)
    flags.DEFINE_string("out", None, "File of the judgements, jsonl; the numbers go beside it as .json.", required=True)
    flags.DEFINE_string("prompt", "", "File with {question}, {golden_answers} and {answer}.")
    flags.DEFINE_integer("connections", 8, "Answers asked about at once.", lower_bound=1)
    flags.DEFINE_enum("normalizer", "squad", list(NORMALIZERS), "Of the EM and cover-EM that it is compared with.")
    try:
        app.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
