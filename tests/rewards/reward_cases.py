"""What the tests of rewards share: turns of an episode, and the authors' 160 scored trajectories."""

import json
from pathlib import Path

import pytest

from parasearch_jax.data import Question
from parasearch_jax.data.questions import kind_of
from parasearch_jax.rollout import Episode

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT.parent / "shared/golden/parallelsearch_rewards.json"
needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="shared/golden is not part of the repository")

DOCS = "\n\n<information>Doc 1(Title: T) text</information>\n\n"
EXAMPLES = "Search: <search> query </search> or <search> a ## b </search>. Then answer: <answer> Beijing </answer>. "
PROMPT = ("prompt", EXAMPLES)

THINK = "<think>t</think>"
ASK, SPLIT = ("policy", THINK + "<search>a</search>"), ("policy", THINK + "\n<search> a ## b </search>")
RIGHT, WRONG = ("policy", THINK + "<answer> Paris </answer>"), ("policy", THINK + "<answer>Rome</answer>")
SAW = ("docs", DOCS)
PARIS = Question("q", "?", "Paris", "single")


def golden_cases():
    """(case, episode, question) of the golden file; its 'observation' is 'docs' here."""
    for case in json.loads(GOLDEN.read_text())["cases"]:
        pairs = [("docs" if source == "observation" else source, text) for source, text in case["segments"]]
        kind = kind_of(case["type"])
        question = Question(case["id"], "q", case["golden_answers"], kind, meta={"type": case["type"]})
        yield case, Episode.from_text([PROMPT, *pairs]), question


def episode(*pairs, protocol="parallel"):
    return Episode.from_text([PROMPT, *pairs], protocol)
