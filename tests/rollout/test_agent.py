"""What the endpoint and the terminal share: settings, prompts, and the trace of an episode."""

import json
import random

import parallel_tiny
import pytest
from scripted import byte_tokenizer

from parasearch_jax import resume
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import get_protocol
from parasearch_jax.rollout import Episode, RolloutConfig, agent
from parasearch_jax.sharding.mesh import MeshConfig

# ------------------------------------------------------------------------------------------------------------- settings


def read(*args, slots=8):
    return agent.read_settings(agent.make_parser("", slots=slots).parse_args(args))


@pytest.fixture
def run(tmp_path):
    """A run's work directory as far as it matters here, and its configuration."""
    config = parallel_tiny.get_config("smoke")
    config.rollout.max_turns = 7
    (tmp_path / "some_run" / "model").mkdir(parents=True)
    (tmp_path / "some_run" / "config.json").write_text(json.dumps(resume.describe(config)))
    (tmp_path / "some_run" / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path / "some_run", config


@pytest.mark.parametrize("inside", ["", "model"])
def test_a_run_is_served_as_it_was_trained(run, inside):
    path, config = run
    found = read(f"--model={path / inside}")
    assert found.name == "some_run"
    assert found.protocol == get_protocol("parallel", prompt=config.protocol.prompt)
    assert found.retriever == config.retriever.to_dict()
    same = config.rollout.to_dict() | {"topk": config.retriever.topk, "slots": 8, "deterministic": False}
    assert found.rollout == RolloutConfig(**same)


def test_an_empty_prompt_of_a_run_is_the_protocols(run):
    path, config = run
    config.protocol.prompt = ""
    (path / "config.json").write_text(json.dumps(resume.describe(config)))
    assert read(f"--model={path}").protocol == get_protocol("parallel")


def test_flags_go_before_the_run(run):
    retriever = '{"kind": "local", "corpus": "x", "topk": 5}'
    found = read(f"--model={run[0]}", f"--retriever={retriever}", "--protocol=search_r1", "--max_turns=2", slots=3)
    assert found.protocol == get_protocol("search_r1")  # the run's prompt belongs to the run's protocol
    assert found.retriever == json.loads(retriever)
    assert (found.rollout.topk, found.rollout.max_turns, found.rollout.slots) == (5, 2, 3)
    assert found.rollout.max_turn_tokens == run[1].rollout.max_turn_tokens
    assert read(f"--model={run[0]}", f"--retriever={retriever}", "--topk=2").rollout.topk == 2
    assert read(f"--model={run[0]}", "--prompt=Q {question}").protocol.prompt == "Q {question}"


def test_a_retriever_is_text_a_file_or_for_the_library(tmp_path):
    file = tmp_path / "r.json"
    file.write_text('{"kind": "local"}')
    assert read("--model=m", f"--retriever={file}").retriever == {"kind": "local"}
    assert read("--model=m", "--retriever=some/directory").retriever == "some/directory"
    for bad, words in (("{", "JSON"), (str(file), "mapping")):
        file.write_text("[]")
        with pytest.raises(UserError, match=words):
            read("--model=m", f"--retriever={bad}")


def test_a_model_that_is_no_run_needs_a_retriever(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match="--retriever is missing"):
        read(f"--model={tmp_path}")
    found = read(f"--model={tmp_path}", "--retriever={}")
    assert found.protocol == get_protocol("parallel") and found.name == tmp_path.name
    assert found.rollout == RolloutConfig(slots=8, deterministic=False)


def test_limits_below_one_are_refused():
    for flags, words in ((["--topk=0"], "topk is 0"), (["--max_turns=-1"], "max_turns is -1")):
        with pytest.raises(UserError, match=words):
            read("--model=m", "--retriever={}", *flags)
    with pytest.raises(UserError, match="slots is 0"):
        read("--model=m", "--retriever={}", slots=0)
    assert read("--model=m", "--retriever={}", "--max_turns=0").rollout.max_turns == 0


def test_a_run_of_another_version_is_refused(run):
    path, config = run
    described = resume.describe(config)
    described["rollout"]["beams"] = 4
    (path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"rollout\.beams"):
        read(f"--model={path}")


# ------------------------------------------------------------------------------------------------------------- messages

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no system here') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
EARLIER = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
]


@pytest.fixture
def chatting():
    """An agent whose tokenizer has a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    protocol, limits = get_protocol("parallel", prompt="Find: {question}\n"), RolloutConfig()
    return agent.Agent(agent.Settings("m", "", "float32", protocol, {}, limits, MeshConfig(), 0), tokenizer, None)


def test_the_last_message_is_asked_as_in_training(chatting):
    """A single question is the prompt that `Engine.rollout` makes; earlier messages stand as they are."""
    assert chatting.prompt([{"role": "user", "content": "q"}]) == "[user]Find: q\n[assistant]"
    found = chatting.prompt([*EARLIER, {"role": "user", "content": "q2"}])
    assert found == "[system]s[user]q1[assistant]a1[user]Find: q2\n[assistant]"
    assert chatting.tokens(found) == len(found)  # this tokenizer encodes bytes


def test_a_template_that_refuses_is_told(chatting):
    with pytest.raises(UserError, match="no system here"):
        chatting.prompt([*EARLIER, EARLIER[0], {"role": "user", "content": "q"}])


def test_without_a_template_one_question_is_asked(chatting):
    chatting.tokenizer.chat_template = None
    assert chatting.prompt([{"role": "user", "content": "q"}]) == "Find: q\n"
    with pytest.raises(UserError, match=r"4 messages.*no chat template"):
        chatting.prompt([*EARLIER, {"role": "user", "content": "q"}])


# ---------------------------------------------------------------------------------------------------------------- trace

SAID = (  # (source, text) pairs behind a prompt, and the answer
    ([("policy", "<think>x</think><answer> a b </answer>\n\n")], "a b"),
    ([("policy", "x <answer>a<answer>b</answer>")], "b"),
    ([("policy", "<answer>a<search>q</search>"), ("docs", "<answer>"), ("policy", "t<answer>c</answer>")], "c"),
    ([("policy", "<answ <sear <answer"), ("notice", "n"), ("policy", "</answer><answer></answer>")], ""),
    ([("policy", "<search>a ## b</search> "), ("docs", "d"), ("policy", "<answer>never closed")], None),
    ([("policy", "<search>q</search>"), ("docs", "d"), ("policy", "<search>not sent</search>")], None),
)  # fmt: skip


@pytest.mark.parametrize("pairs, answer", SAID)
def test_a_trace_does_not_depend_on_how_the_text_is_cut(pairs, answer):
    episode = Episode.from_text([("prompt", "<answer>p</answer>"), *pairs])
    assert episode.answer == answer  # the case is what it is meant to be
    whole = agent.replay(get_protocol("parallel"), episode)
    text = "".join(text for kind, text in whole if kind != "answer")
    response = "".join(text for _, text in pairs)
    assert [text for kind, text in whole if kind == "answer"] == ([] if answer is None else [answer])
    end = len(response) if answer is None else len(response) - len(pairs[-1][1]) + episode.actions[-1].span[1]
    assert text == response[:end]
    rng = random.Random(0)
    for _ in range(30):
        trace, pieces = agent.Trace(get_protocol("parallel")), []
        for source, text in pairs:
            while source == "policy" and text:
                n = rng.randint(1, 9)
                pieces += trace.feed(source, text[:n])
                text = text[n:]
            pieces += trace.feed(source, text) if source != "policy" else []
        assert merged(pieces + trace.end(episode)) == merged(whole)


def merged(pieces):
    """Neighbours of one kind as one piece."""
    out = []
    for kind, text in pieces:
        if out and out[-1][0] == kind:
            out[-1][1] += text
        else:
            out.append([kind, text])
    return out


def test_queries_are_told_from_thoughts():
    episode = Episode.from_text(
        [("policy", "a<search>q ## r</search>\n"), ("docs", "d"), ("policy", "<answer>x</answer>")]
    )
    assert agent.replay(get_protocol("parallel"), episode) == [
        ("thought", "a"),
        ("query", "<search>q ## r</search>"),
        ("thought", "\n"),
        ("docs", "d"),
        ("answer", "x"),
    ]  # fmt: skip
