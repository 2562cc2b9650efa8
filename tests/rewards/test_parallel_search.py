"""ParallelSearch's reward: `released` against the authors' scorer, `paper` against Eq. 3-7 written out by hand.

Run as a program it prints the table of docs/rewards.md.
"""

import re
from collections import defaultdict

import pytest
from reward_cases import ASK, DOCS, PROMPT, RIGHT, ROOT, SAW, SPLIT, THINK, WRONG, golden_cases, needs_golden

from parasearch_jax.data import Question
from parasearch_jax.data.questions import kind_of
from parasearch_jax.errors import UserError
from parasearch_jax.rewards import make_reward, score
from parasearch_jax.rewards.format import released_text, valid_by_provenance, valid_by_text
from parasearch_jax.rewards.parallel_search import QUIRKS, parallel_search
from parasearch_jax.rollout import Episode


def total(episode, question, variant="paper", **params):
    return sum(score("parallel_search", episode, question, variant, **params).values())


# --- released ---------------------------------------------------------------------------------------------------------


@needs_golden
@pytest.mark.parametrize(
    ("key", "params"), [("total", {}), ("total_ld0", {"lambda_d": 0}), ("total_ls0", {"lambda_s": 0})]
)
def test_released_totals(key, params):
    checked = 0
    for case, episode, question in golden_cases():
        expected = case["released"][key]
        if case["prompt_example_leak"] and "Beijing" in case["golden_answers"]:
            continue  # test_the_prompt_example_is_no_answer
        assert total(episode, question, "released", **params) == pytest.approx(expected, abs=1e-9), case["id"]
        checked += 1
    assert checked == 159


@needs_golden
def test_the_prompt_example_is_no_answer():
    """Eight cases give no answer; the released extractor then reads "Beijing" in the prompt.

    All eight are ill-formed. Where the gold is not Beijing, wrong and none are worth the same there (0), so the totals
    agree. Where it is (r10), the released scorer pays 1 - lambda_f for a correct, ill-formed answer and ours 0.
    """
    leaks = [(c, e, q) for c, e, q in golden_cases() if c["prompt_example_leak"]]
    assert len(leaks) == 8
    for case, episode, question in leaks:
        parts = score("parallel_search", episode, question, "released")
        assert episode.answer is None and not case["released"]["valid_format"]
        assert (parts["outcome"], parts["format"]) == (0.0, 0.0)
        paid = 0.9 if case["golden_answers"] == ["Beijing"] else 0.0
        assert sum(parts.values()) == pytest.approx(case["released"]["total"] - paid), case["id"]
    assert [c["id"] for c, _, _ in leaks if c["golden_answers"] == ["Beijing"]] == ["r10"]


@needs_golden
def test_released_validity():
    verdicts = [(valid_by_text(released_text(e)), case["released"]["valid_format"]) for case, e, _ in golden_cases()]
    assert all(ours == theirs for ours, theirs in verdicts)
    assert {theirs for _, theirs in verdicts} == {True, False}


def correct_valid(n, decomposed, think="<think>t</think>"):
    query = "<search> a ## b </search>" if decomposed else "<search> a </search>"
    searches = [("policy", think + (query if i == 0 else "<search> c </search>")) for i in range(n)]
    pairs = [pair for search in searches for pair in (search, ("docs", DOCS))]
    return Episode.from_text([PROMPT, *pairs, ("policy", think + "<answer> Paris </answer>")])


@pytest.mark.parametrize(
    ("type", "decomposed", "totals"),  # n = 0 ... 5; methods.md 2.2, run with the authors' scorer
    [
        ("comparison", True, [None, 1.80, 1.45, 1.10, 0.75, 0.40]),
        ("comparison", False, [1.00, 1.35, 1.00, 0.65, 0.30, -0.05]),
        ("bridge", False, [0.80, 1.15, 1.50, 1.50, 1.50, 1.50]),
        ("bridge", True, [None, 1.00, 1.35, 1.35, 1.35, 1.35]),
        ("na", False, [1.15, 1.50, 1.15, 0.80, 0.45, 0.10]),
        ("na", True, [None, 1.35, 1.00, 0.65, 0.30, -0.05]),
    ],
)
def test_published_table(type, decomposed, totals):
    question = Question("q", "?", "Paris", kind_of(type), meta={"type": type})
    for n, expected in enumerate(totals):
        if expected is None:
            continue
        episode = correct_valid(n, decomposed)
        assert total(episode, question, "released") == pytest.approx(expected)
        assert total(episode, question, "paper") == pytest.approx(expected - 0.35)  # here only the offset differs


NOTICE = "\nInvalid. To search write <search> and </search>, to finish <answer> and </answer>.\n"


@pytest.mark.parametrize(
    ("type", "pairs", "released", "paper"),
    [
        # a tagged notice is counted, becomes the first search and breaks the format (quirk 11: .90 and 1.05)
        (
            "comparison",
            [("policy", "hm"), ("notice", NOTICE), ("policy", THINK + "<search>a##b</search>"), ("docs", DOCS)],
            0.90,
            1 + 0.45 + 0 - 0.1,
        ),
        (
            "na",
            [("policy", "hm"), ("notice", NOTICE), ("policy", THINK + "<search>a</search>"), ("docs", DOCS)],
            1.05,
            1 + 0.15 + 0 - 0.1,
        ),
        # an observation cut before its closing tag (quirk 6: 1.70), which the policy cannot help
        ("comparison", [("policy", THINK + "<search>a##b</search>"), ("docs", DOCS[:20])], 1.70, 1.45),
        # one empty sub-query (quirk 4)
        ("comparison", [("policy", THINK + "<search>a ## </search>"), ("docs", DOCS)], 1.80, 1.0),
        # split in the second search (quirk 2)
        (
            "comparison",
            [(s, t) for q in ("a", "a##b") for s, t in (("policy", f"{THINK}<search>{q}</search>"), ("docs", DOCS))],
            1.00,
            1 + 0.45 - 0.35,
        ),
        # a search tag in a document (quirk 8): n 2, and the format
        (
            "comparison",
            [("policy", THINK + "<search>a##b</search>"), ("docs", DOCS[:-17] + "<search>" + DOCS[-17:])],
            1.35,
            1.45,
        ),
    ],
)
def test_quirks(type, pairs, released, paper):
    question = Question("q", "?", "Paris", kind_of(type), meta={"type": type})
    episode = Episode.from_text([PROMPT, *pairs, ("policy", THINK + "<answer> Paris </answer>")])
    assert total(episode, question, "released") == pytest.approx(released)
    assert total(episode, question, "paper") == pytest.approx(paper)


def test_released_flag_reads_the_original_type_and_ours_stand_in():
    episode = correct_valid(1, True)
    expected = {  # decomposition and search_count for flag +1, 0, -1
        1: (0.45, 0.35),
        0: (0.0, 0.0),
        -1: (0.0, 0.35),
    }
    types = [("comparison", 1), ("comparison_query", 0), ("bridge_comparison", 0), ("na", -1), ("parallel", 1)]
    for type, flag in [*types, ("sequential", 0), ("single", -1), ("single-hop", -1)]:
        question = Question("q", "?", "Paris", kind_of(type), meta={"type": type})
        parts = score("parallel_search", episode, question, "released")
        assert (parts["decomposition"], parts["search_count"]) == pytest.approx(expected[flag]), type
    assert score("parallel_search", episode, Question("q", "?", "Paris", "parallel"), "released") == pytest.approx(
        {"outcome": 1, "decomposition": 0.45, "search_count": 0.35, "format": 0}
    )


NOTED = [("policy", "hm"), ("notice", NOTICE)]


@pytest.mark.parametrize(
    ("quirk", "type", "golds", "pairs", "paper", "switched"),  # (part, value) that the switch changes
    [
        ("offset", "na", "Paris", [ASK, SAW, RIGHT], ("search_count", 0.0), 0.35),
        ("count_tags", "na", "Paris", [*NOTED, ASK, SAW, RIGHT], ("search_count", 0.0), -0.35),
        ("first_search", "comparison", "Paris", [ASK, SAW, SPLIT, SAW, RIGHT], ("decomposition", 0.45), 0.0),
        ("raw_split", "comparison", "Paris", [("policy", THINK + "<search>a ## </search>"), SAW, RIGHT],
         ("decomposition", 0.0), 0.45),
        ("last_answer", "na", "Paris", [("policy", WRONG[1] + RIGHT[1])], ("outcome", 0.0), 1.0),
        ("squad_em", "na", "A", [("policy", THINK + "<answer></answer>")], ("outcome", 0.0), 1.0),
        ("text_format", "na", "Paris", [ASK, ("docs", DOCS[:20]), RIGHT], ("format", 0.0), -0.1),
        ("exact_type", "comparison_query", "Paris", [SPLIT, SAW, RIGHT], ("decomposition", 0.45), 0.0),
    ],
)  # fmt: skip
def test_each_quirk_is_a_switch(quirk, type, golds, pairs, paper, switched):
    """Alone on top of the paper it changes this part; taken from `released` it gives back what the rest makes of it."""
    episode = Episode.from_text([PROMPT, *pairs])
    question = Question("q", "?", golds, kind_of(type), meta={"type": type})
    part, value = paper
    assert score("parallel_search", episode, question)[part] == pytest.approx(value)
    assert score("parallel_search", episode, question, **{quirk: True})[part] == pytest.approx(switched)
    all_on = {name: True for name in QUIRKS}
    released = score("parallel_search", episode, question, "released")
    assert released == score("parallel_search", episode, question, **all_on)
    assert score("parallel_search", episode, question, "released", **{quirk: False}) != released


def test_the_switch_cases_cover_every_quirk():
    (mark,) = (m for m in test_each_quirk_is_a_switch.pytestmark if m.name == "parametrize")
    assert {case[0] for case in mark.args[1]} == set(QUIRKS)


@pytest.mark.parametrize(("constant", "part"), [
    ("lambda_d", "decomposition"), ("alpha", "decomposition"), ("lambda_s", "search_count"), ("lambda_f", "format"),
])  # fmt: skip
def test_each_constant_scales_its_part_alone(constant, part):
    episode = Episode.from_text([PROMPT, SPLIT, SAW, ASK, SAW, WRONG])  # no part but the outcome is 0
    question = Question("q", "?", "Paris", "parallel")
    default = score("parallel_search", episode, question)
    doubled = score("parallel_search", episode, question, **{constant: 2 * parallel_search.__kwdefaults__[constant]})
    assert doubled == pytest.approx(default | {part: 2 * default[part]}) and default[part]


def test_the_first_of_all_pairs_decides_in_released():
    """Together `first_search` and `raw_split` read the first pair of the text, be it the notice's; alone each is what
    it says."""
    question = Question("q", "?", "Paris", "parallel")
    episode = Episode.from_text([PROMPT, *NOTED, SPLIT, SAW, RIGHT])
    quirks = {"first_search": True, "raw_split": True}
    split = lambda **q: score("parallel_search", episode, question, **q)["decomposition"] > 0  # noqa: E731
    assert not split(**quirks) and split(first_search=True) and split(raw_split=True) and split()


# --- paper ------------------------------------------------------------------------------------------------------------


def by_hand(case, lambda_d=0.15, lambda_s=0.35, lambda_f=0.1, alpha=3):
    """Eq. 3-7 from the raw segments, sharing no code with the package."""
    n, split, well_formed, answer = 0, False, True, None
    for i, (source, text) in enumerate(case["segments"]):
        if source != "policy":
            continue
        answer = None  # only the last turn's answer ends the episode
        clean = re.fullmatch(r"\s*<think>[^<]*</think>\s*<(search|answer)>[^<]*</\1>\s*", text)
        block = re.search(r"<(search|answer)>([^<]*)</\1>", text)
        searched = case["segments"][i + 1 : i + 2] and case["segments"][i + 1][0] == "observation"
        if block and block[1] == "answer":
            answer = block[2]
        elif block and searched:
            n += 1
            split |= len([q for q in block[2].split("##") if q.strip()]) > 1
        else:
            clean = None
        well_formed &= clean is not None
    words = [re.sub(r"[^\w\s]", "", t.lower()).split() for t in (answer or "", *case["golden_answers"])]
    bare = [[w for w in ws if w not in ("a", "an", "the")] or ws[-1:] for ws in words]
    correct = bare[0] != [] and bare[0] in bare[1:]
    parallel = case["type"] == "comparison"
    sequential = case["type"] in ("bridge", "compositional", "inference_query", "bridge_comparison")
    r = 1.0 if correct else 0.0
    if parallel and split:
        r += alpha * lambda_d
    if not parallel and not split:
        r += lambda_d
    r -= lambda_s * (abs(min(n, 2) - 2) if sequential else abs(n - 1))
    if correct and not well_formed:
        r -= lambda_f
    if not correct and well_formed and answer is not None:
        r += lambda_f
    return r


@needs_golden
@pytest.mark.parametrize(
    "params", [{}, {"lambda_d": 0}, {"lambda_s": 0}, {"lambda_f": 0}, {"alpha": 5, "lambda_d": 0.2, "lambda_f": 0.3}]
)
def test_paper_totals(params):
    totals = set()
    for case, episode, question in golden_cases():
        assert total(episode, question, **params) == pytest.approx(by_hand(case, **params), abs=1e-9), case["id"]
        totals.add(round(by_hand(case, **params), 6))
    assert len(totals) > 10


@pytest.mark.parametrize(
    ("kind", "pairs", "parts"),  # outcome, decomposition, search_count, format
    [
        ("parallel", [SPLIT, SAW, RIGHT], (1, 0.45, 0, 0)),
        ("parallel", [ASK, SAW, ASK, SAW, RIGHT], (1, 0, -0.35, 0)),
        ("parallel", [SPLIT, SAW, SPLIT, SAW, ASK, SAW, WRONG], (0, 0.45, -0.7, 0.1)),
        ("parallel", [RIGHT], (1, 0, -0.35, 0)),
        ("single", [ASK, SAW, RIGHT], (1, 0.15, 0, 0)),
        ("single", [SPLIT, SAW, RIGHT], (1, 0, 0, 0)),
        ("single", [RIGHT], (1, 0.15, -0.35, 0)),
        ("sequential", [ASK, SAW, ASK, SAW, RIGHT], (1, 0.15, 0, 0)),
        ("sequential", [ASK, SAW, ASK, SAW, ASK, SAW, ASK, SAW, RIGHT], (1, 0.15, 0, 0)),
        ("sequential", [ASK, SAW, WRONG], (0, 0.15, -0.35, 0.1)),
        ("sequential", [RIGHT], (1, 0.15, -0.7, 0)),
        # a search that was not executed counts for nothing and is no valid turn; no answer is wrong and ill-formed
        ("parallel", [ASK, SAW, SPLIT], (0, 0, 0, 0)),
        ("single", [("policy", "hm"), ("notice", "no"), ASK, SAW, RIGHT], (1, 0.15, 0, -0.1)),
        (
            "single",
            [("policy", THINK + "<search> ## </search>"), ("notice", "no"), ASK, SAW, RIGHT],
            (1, 0.15, 0, -0.1),
        ),
        ("single", [ASK, ("notice", "no"), ASK, SAW, RIGHT], (1, 0.15, 0, -0.1)),
        ("single", [ASK, SAW, ("policy", THINK + "<answer></answer>")], (0, 0.15, 0, 0.1)),
        ("single", [ASK, SAW, ("policy", THINK)], (0, 0.15, 0, 0)),
        ("single", [ASK, SAW, ("policy", "<answer>Paris</answer>")], (1, 0.15, 0, -0.1)),
        ("single", [ASK, SAW, ("policy", THINK + "<answer>Rome</answer> or Paris")], (0, 0.15, 0, 0)),
    ],
)
def test_paper_parts_typed_by_hand(kind, pairs, parts):
    names = ("outcome", "decomposition", "search_count", "format")
    ours = score("parallel_search", Episode.from_text([PROMPT, *pairs]), Question("q", "?", ["Paris"], kind))
    assert ours == pytest.approx(dict(zip(names, parts, strict=True)))


@pytest.mark.parametrize(
    ("turn", "valid"),
    [
        ("<think>t</think><answer>x</answer>", True),
        (" \n<think></think>\n<answer>x</answer>\n\n", True),
        ("<think>t</think><answer>x</answer><|im_end|>", True),  # the end token is no content
        ("<think>t</think><answer>x</answer>\n<|endoftext|>", True),
        ("<think>a < b, <b>x</b></think><answer>x</answer>", True),
        ("<think>t</think>and<answer>x</answer>", False),
        ("<think>t</think><answer>x</answer>.", False),
        ("<think>t<answer>x</answer>", False),
        ("<think>t<think>u</think><answer>x</answer>", False),
        ("<think>t</think><think>u</think><answer>x</answer>", False),
        ("<think>in <information></think><answer>x</answer>", False),
        ("<think>t</think><answer>x</answer><answer>x</answer>", False),
        ("<answer>x</answer>", False),
        ("", False),
    ],
)
def test_validity_of_a_turn(turn, valid):
    episode = Episode.from_text([("policy", turn)])
    assert valid_by_provenance(episode) is valid
    assert valid_by_text(released_text(episode)) is valid  # a single turn: both rules agree


def test_validity_by_provenance_ignores_what_the_environment_wrote():
    episode = Episode.from_text([PROMPT, ASK, ("docs", "<information> x </answer><think>"), RIGHT])
    assert valid_by_provenance(episode) and not valid_by_text(released_text(episode))
    assert not valid_by_provenance(Episode.from_text([ASK, SAW])) and not valid_by_provenance(Episode())


# --- answers in the wrong place, in both variants ---------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize(
    ("pairs", "golds", "outcome"),  # T01
    [
        ([("policy", "<answer> Paris </answer>")], ["Paris"], 1),
        ([("policy", "I do not know.")], ["Paris"], 0),
        ([("policy", "I do not know.")], ["Beijing"], 0),
        ([("policy", "<think>Paris</think><answer>Rome</answer>")], ["Paris"], 0),
        ([("policy", "<think>Paris</think>")], ["Paris"], 0),
        ([ASK, ("docs", "<information>Paris</information>"), ("policy", "hm")], ["Paris"], 0),
        ([("policy", "<answer>Paris")], ["Paris"], 0),
        ([("policy", "<answer></answer>")], ["Paris"], 0),
    ],
)
def test_only_an_answer_block_is_an_answer(variant, pairs, golds, outcome):
    parts = score("parallel_search", Episode.from_text([PROMPT, *pairs]), Question("q", "?", golds, "single"), variant)
    assert parts["outcome"] == outcome


@pytest.mark.parametrize(
    ("pairs", "golds"),
    [
        ([ASK, ("docs", "<information><answer>Paris</answer></information>"), ("policy", "hm")], ["Paris"]),
        ([("policy", "hm"), ("notice", "write <answer>Paris</answer>"), ("policy", "hm")], ["Paris"]),
        ([("policy", "<answer>Rome</answer><answer>Paris</answer>")], ["Paris"]),
        ([("policy", "<answer></answer>")], ["A"]),
    ],
)
def test_the_released_scorer_is_fooled_and_paper_is_not(pairs, golds):
    episode, question = Episode.from_text([PROMPT, *pairs]), Question("q", "?", golds, "single")
    assert score("parallel_search", episode, question, "released")["outcome"] == 1.0
    assert score("parallel_search", episode, question, "paper")["outcome"] == 0.0


def test_the_environment_cannot_change_the_paper_reward():
    block = "<search>x ## y</search><answer>Paris</answer><think>"
    question = Question("q", "?", "Paris", "parallel")
    plain = Episode.from_text([PROMPT, ASK, SAW, ("policy", "hm"), ("notice", "no"), WRONG])
    hostile = [("prompt", block), ASK, ("docs", block), ("policy", "hm"), ("notice", block), WRONG]
    assert score("parallel_search", Episode.from_text(hostile), question) == score("parallel_search", plain, question)


# --- unknown kinds, log, docs -----------------------------------------------------------------------------------------


def test_unknown_kinds_are_refused_with_their_number_unless_named():
    unknown = Question("t1", "?", "Paris", "unknown", meta={"type": "temporal_query"})
    questions = [unknown, Question("q", "?", "Paris", "single"), unknown]
    reward = make_reward({"name": "parallel_search"})
    with pytest.raises(UserError, match=r"2 of 3 questions .*'t1', type 'temporal_query'.*reward\.unknown"):
        reward.check(questions)
    episode = correct_valid(1, True)
    with pytest.raises(UserError, match="unknown kind"):
        reward(episode, unknown)
    named = make_reward({"name": "parallel_search", "unknown": "parallel"})
    named.check(questions)
    assert sum(named(episode, unknown)[0].values()) == pytest.approx(1.45)
    assert total(episode, unknown, unknown="sequential") == pytest.approx(1 - 0.35)
    with pytest.raises(UserError, match=r"reward\.unknown is 'maybe'"):
        make_reward({"name": "parallel_search", "unknown": "maybe"})


def test_everything_that_differs_is_in_docstring_and_log():
    log = make_reward({"name": "parallel_search", "variant": "released", "lambda_d": 0.2}).describe()
    assert "variant=released, lambda_d=0.2" in log and "offset" in log and log.count("released:") == 8
    assert "released:" not in make_reward("parallel_search").describe()
    assert "QUIRKS" in parallel_search.__doc__
    mixed = make_reward({"name": "parallel_search", "variant": "released", "first_search": False}).describe()
    assert mixed.count("released:") == 7 and "as in the paper: first_search" in mixed


def differences():
    """Golden cases in which the variants differ by more than the offset: reason -> ids."""
    reasons = defaultdict(list)
    for case, episode, question in golden_cases():
        paper = score("parallel_search", episode, question, "paper")
        released = score("parallel_search", episode, question, "released")
        assert released["search_count"] == pytest.approx(paper["search_count"] + 0.35)
        if released["outcome"] != paper["outcome"]:
            two = case["fault"] == "two_answers"
            reason = "the last answer counts, not the executed one" if two else "an empty answer equals the gold A"
            reasons[reason].append(case["id"])
        if released["decomposition"] != paper["decomposition"]:
            reasons["only the first search is looked at for ##"].append(case["id"])
    return reasons


def table():
    reasons = sorted(differences().items())
    rows = [f"| {reason} | {len(ids)} | {', '.join(ids)} |" for reason, ids in reasons]
    either = len({i for _, ids in reasons for i in ids})
    return "\n".join(["| reason | cases | ids |", "|---|---|---|", *rows, f"| any of these | {either} | |"])


@needs_golden
def test_the_table_in_the_docs_is_current():
    assert table() in (ROOT / "docs/rewards.md").read_text()


if __name__ == "__main__":
    print(table())
