"""R1-Searcher's rewards, under tags as its own and under ours, and its metrics on its own trajectories."""

import json

import pytest
from reward_cases import ASK, DOCS, PARIS, RIGHT, ROOT, SAW, SPLIT, THINK, WRONG, episode

from parasearch_jax.data import Question
from parasearch_jax.data import r1_searcher_metrics as metrics
from parasearch_jax.protocol import get_protocol
from parasearch_jax.rewards import score
from parasearch_jax.rewards.r1_searcher import LLAMA_QUIRKS, QWEN_QUIRKS, STAGE1_QUIRKS
from parasearch_jax.rollout import Episode, Segment

STAGES = {"r1_searcher_stage1": STAGE1_QUIRKS, "r1_searcher_stage2": QWEN_QUIRKS}
STAGES |= {"r1_searcher_stage2_llama": LLAMA_QUIRKS}


PIPES = get_protocol("r1_searcher")
OPEN = Segment("prompt", "User: q\nAssistant: <think>")
QUERY, BLOCK = "a <|begin_of_query|> q <|end_of_query|>", PIPES.observation(["(1)T text\n"])
CLEAN = [("policy", QUERY), ("docs", BLOCK), ("policy", "so </think>\n\n<answer> Paris </answer>")]


def pipes(*pairs):
    """An episode of text alone: the released servers read nothing else."""
    return Episode([OPEN, *(Segment(*pair) for pair in pairs)], protocol=PIPES)


def changed(old, new, source=None):
    """CLEAN with a string in it replaced; `source`: only there."""
    assert any(old in text for s, text in CLEAN if source in (None, s))
    return pipes(*((s, text.replace(old, new) if source in (None, s) else text) for s, text in CLEAN))


def total(name, episode, question=PARIS, variant="released", **params):
    return sum(score(name, episode, question, variant, **params).values())


@pytest.mark.parametrize(
    ("played", "golds", "qwen", "llama", "stage1"),
    [
        (pipes(*CLEAN), "Paris", 1.0, 1.0, 2.0),
        (changed("Paris", "Rome"), "Paris", 0.0, 0.0, 0.0),
        (changed("Paris", "in Paris"), "Paris", 2 / 3, 2 / 3, 2.0),
        (changed("Paris", "one two three four five six seven eight nine ten eleven"),
         "one two three four five six seven eight nine ten eleven", -1.0, 1.0, 2.0),
        (changed("Paris", "one two three four five six seven eight nine ten"),
         "one two three four five six seven eight nine ten", 1.0, 1.0, 2.0),
        (changed("<answer> Paris </answer>", "Paris"), "Paris", -2.0, -1.0, -0.5),  # no answer
        (changed("text", "an assistant", "docs"), "Paris", -1.0, 1.0, 2.0),
        (changed("so", "The Assistant", "policy"), "Paris", -1.0, 1.0, 2.0),
        (changed("so", "\u56e0\u6b64", "policy"), "Paris", -1.0, 0.0, 2.0),
        (changed("text", "\u56e0\u6b64", "docs"), "Paris", 1.0, 1.0, 2.0),  # in a document they may stand
        (changed("so", "so <think>", "policy"), "Paris", -1.0, 0.0, 1.5),
        (changed("so </think>", "so", "policy"), "Paris", -1.0, 0.0, 1.5),
        (changed("so", "so <answer> x </answer>", "policy"), "Paris", -1.0, 0.0, 1.5),
        # one query more than documents: ended by the cap, or by an empty query
        (pipes(*CLEAN[:2], ("policy", QUERY + CLEAN[2][1])), "Paris", -1.0, 0.0, 1.5),
        (changed("\n\n", "\n", "docs"), "Paris", -1.0, 0.0, 1.5),  # the block without its blank line
        (changed("(1)", "", "docs"), "Paris", -1.0, 0.0, 1.5),
        (pipes(CLEAN[2]), "Paris", 1.0, 1.0, 1.5),  # no search: nothing is unequal, but stage 1 wants one
        (changed("Paris", "Paris begin_of_query"), "Paris", 0.4 - 2, 0.4, 2.0),
        (changed("<answer>", "<answer> x <answer>", "policy"), "Paris", -1.0, 0.0, 1.5),  # behind the last tag
    ],
)  # fmt: skip
def test_released(played, golds, qwen, llama, stage1):
    question = Question("q", "?", golds)
    assert total("r1_searcher_stage2", played, question) == pytest.approx(qwen)
    assert total("r1_searcher_stage2_llama", played, question) == pytest.approx(llama)
    assert total("r1_searcher_stage1", played, question) == pytest.approx(stage1)


def test_released_takes_the_tags_of_the_episodes_protocol():
    """Under ours one thought, and a search in it, can be well-formed too; a turn more has a thought of its own."""
    search = ("policy", "<think>t<search>a</search>")
    one = episode(search, ("docs", DOCS), ("policy", "so</think><answer>Paris</answer>"))
    assert total("r1_searcher_stage2", one) == 1.0 and total("r1_searcher_stage1", one) == 2.0
    assert total("r1_searcher_stage2", episode(search, ("docs", DOCS[:-10]), RIGHT)) == -1.0
    assert total("r1_searcher_stage2", episode(ASK, SAW, RIGHT)) == -1.0
    assert total("r1_searcher_stage2", episode(("policy", THINK + "<answer>Google search</answer>"))) == 0.0


@pytest.mark.parametrize(
    ("pairs", "stage1", "stage2"),  # (search, format), (f1, format)
    [
        ([ASK, SAW, RIGHT], (0.5, 0.5), (1.0, 0.0)),
        ([SPLIT, SAW, WRONG], (0.5, 0.5), (0.0, 0.0)),
        ([RIGHT], (0.0, 0.5), (1.0, 0.0)),
        ([ASK, SAW, ("policy", "<answer>in Paris</answer>")], (0.5, 0.0), (2 / 3, -2.0)),
        ([ASK, SAW, ("policy", "hm")], (0.5, 0.0), (0.0, -2.0)),
        ([("policy", THINK + "<search>a</search>")], (0.0, 0.0), (0.0, -2.0)),  # not executed
        ([ASK, ("docs", "assistant </answer>"), RIGHT], (0.5, 0.5), (1.0, 0.0)),  # the environment's text
    ],
)
def test_paper(pairs, stage1, stage2):
    played = episode(*pairs)
    expected = dict(zip(("search", "format", "answer"), (*stage1, 0.0), strict=True))
    assert score("r1_searcher_stage1", played, PARIS) == expected
    expected = {"f1": pytest.approx(stage2[0]), "format": stage2[1]}
    assert score("r1_searcher_stage2", played, PARIS) == expected
    assert score("r1_searcher_stage2_llama", played, PARIS) == expected | {"format": stage2[1] / 2}
    doubled = score("r1_searcher_stage1", played, PARIS, search=1.0, well_formed=1.0)
    assert doubled == {"search": 2 * stage1[0], "format": 2 * stage1[1], "answer": 0.0}


NAMED_TAG = THINK + "<answer>a <information></answer>"


@pytest.mark.parametrize(
    ("name", "quirk", "pairs", "paper", "switched"),
    [
        ("r1_searcher_stage1", "pays_answer", [ASK, SAW, ("policy", THINK + "<answer>in Paris</answer>")], 1.0, 2.0),
        ("r1_searcher_stage1", "pays_answer", [ASK, SAW, WRONG], 1.0, 0.0),
        ("r1_searcher_stage1", "last_answer", [ASK, SAW, ("policy", WRONG[1] + RIGHT[1])], -0.5, 1.5),
        ("r1_searcher_stage1", "count_tags", [ASK, ("docs", DOCS[:-10]), RIGHT], 1.0, 0.5),
        ("r1_searcher_stage1", "text_format", [("policy", "." + RIGHT[1])], 0.0, 0.5),
        *[
            (name, quirk, pairs, *values)
            for name in ("r1_searcher_stage2", "r1_searcher_stage2_llama")
            for quirk, pairs, values in [
                ("last_answer", [("policy", WRONG[1] + RIGHT[1])], (-1.0, 0.0)),
                ("count_tags", [ASK, ("docs", DOCS[:-10]), RIGHT], (1.0, 0.0)),
                ("text_format", [("policy", "." + RIGHT[1])], (0.0, 1.0)),
                ("chinese", [("policy", THINK.replace("t<", "\u56e0<") + RIGHT[1][len(THINK):])], (1.0, 0.0)),
            ]
        ],
        ("r1_searcher_stage2", "assistant", [ASK, ("docs", DOCS.replace("text", "assistant")), RIGHT], 1.0, 0.0),
        ("r1_searcher_stage2", "tags_in_answer", [("policy", NAMED_TAG)], 0.0, -1.0),
        ("r1_searcher_stage2", "long_answer", [("policy", f"{THINK}<answer>{'x ' * 10}Paris</answer>")], 1 / 6, -5 / 6),
    ],
)  # fmt: skip
def test_each_quirk_is_a_switch(name, quirk, pairs, paper, switched):
    """With a penalty of 1 everywhere. Stage 1's answer is looked at only where it is paid; a tag in an answer is a
    fault of the paper's format too."""
    params = {"penalty": 1.0} if "stage2" in name else {}
    params |= {"pays_answer": True} if quirk == "last_answer" and not params else {}
    params |= {"text_format": True} if quirk == "tags_in_answer" else {}
    played = episode(*pairs)
    assert total(name, played, variant="paper", **params) == pytest.approx(paper)
    assert total(name, played, variant="paper", **params | {quirk: True}) == pytest.approx(switched)


def test_the_switch_cases_cover_every_quirk():
    (mark,) = (m for m in test_each_quirk_is_a_switch.pytestmark if m.name == "parametrize")
    assert {case[:2] for case in mark.args[1]} == {(name, q) for name, quirks in STAGES.items() for q in quirks}


@pytest.mark.parametrize(
    ("answer", "em", "cover"), [("Paris", 1, 1), ("in Paris", -1, 1), ("Rome", -1, -1), ("", -1, -1), (None, -1, -1)]
)
def test_signed_match(answer, em, cover):
    played = episode(ASK, SAW, ("policy", "hm" if answer is None else f"{THINK}<answer>{answer}</answer>"))
    assert score("r1_searcher_em", played, PARIS) == {"em": em}
    assert score("r1_searcher_cover_em", played, PARIS) == {"cover_em": cover}
    other_order = Question("q", "?", "paris in")
    assert score("r1_searcher_cover_em", played, other_order) == {"cover_em": 1 if answer == "in Paris" else -1}


@pytest.mark.parametrize(
    ("prediction", "golds", "em", "f1", "bag", "contiguous"),
    [
        ("U.S.", "u s", 1, 1, 1, 1),
        ("The 1,000", "1 000", 1, 1, 1, 1),
        ("O’Neil", "o neil", 1, 1, 1, 1),
        ("True", "yes", 1, 1, 1, 1),
        ("yes it is", "yes", 0, 0, 1, 1),  # whole or not at all
        ("no", "no answer", 0, 0, 0, 0),
        ("York New", "New York", 0, 1, 1, 0),
        ("Newcastle", "castle", 0, 0, 0, 1),  # its letters
        ("x", ["A", "x"], 1, 1, 1, 1),
        ("the", "a", 0, 0, 0, 0),
        (None, "None", 0, 0, 0, 0),
    ],
)
def test_metrics(prediction, golds, em, f1, bag, contiguous):
    ours = [m(prediction, golds) for m in (metrics.em, metrics.f1, metrics.cover_em_bag, metrics.cover_em_contiguous)]
    assert ours == [em, f1, bag, contiguous]


DATA = ROOT.parent / "shared/data/trajectories"


def test_released_on_the_authors_trajectories(golden):
    """Queries, documents and the answer of every line; EM, F1 and both cover-EMs; and of the reward the F1, and which
    lines have a query more or less than documents."""
    files = json.loads(golden("r1searcher_metrics.json").read_text())["files"]
    lines = 0
    for name, rows in files.items():
        for row, line in zip(rows, map(json.loads, (DATA / name).read_text().splitlines()), strict=True):
            lines += 1
            ours = metrics.em, metrics.f1, metrics.cover_em_bag, metrics.cover_em_contiguous
            names = "em", "f1", "cover_em_bag", "cover_em_contiguous"
            found = {n: round(metric(row["pred"], line["answer"]), 6) for n, metric in zip(names, ours, strict=True)}
            assert found == {n: row[n] for n in names}, row["id"]
            pairs = [("prompt", OPEN.text), *PIPES.split(line["gen_text_store"])]
            assert "".join(text for _, text in pairs[1:]) == line["gen_text_store"]
            played = Episode.from_text(pairs, PIPES)
            assert len(played.searches) == row["n_query_end"] == sum(source == "docs" for source, _ in pairs)
            assert played.answer == row["pred"].strip(), row["id"]
            parts = score("r1_searcher_stage2", played, Question(row["id"], "?", line["answer"]), "released")
            if "</answer>" in line["gen_text_store"]:
                assert round(parts["f1"], 6) == row["f1"], row["id"]
            if row["n_query_end"] != row["n_docs_begin"]:
                assert parts["format"] == -2.0, row["id"]
    assert lines == 270
