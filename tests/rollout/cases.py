"""What the tests of the engine share: scripts and limits, questions, and what holds for every episode."""

from plain import ids
from scripted import LOOP, PROTOCOL, Fake, drawn_questions

from parasearch_jax.data import Question
from parasearch_jax.rollout import Episode
from parasearch_jax.toy.tokenizer import END

TOTAL = 256
LIMITS = dict(slots=4, chunk=4, max_turns=3, max_turn_tokens=40, max_total_tokens=TOTAL, observation_tokens=200, topk=1)
SHORT = LIMITS | dict(slots=3, max_total_tokens=192, max_turn_tokens=24)  # for the random model

# By the marker that is the question. Every piece occurs once; a tag is cut differently each time.
SCRIPTS = {
    "A": [["<think>a</think>", "<sea", "rch>a1 ## a2</se", "arch>"], ["<answer> yes-a</answer>"]],
    "B": [["<search>b", "1</search>\n\n"], ["<answer>b", "</answer> and more"]],
    "C": [["I do not know", END], ["<answer>c</ans", "wer>"]],
    "E": [[f"<search>e{i}", f"</search>{i}"] for i in range(6)],
    "F": [["f goes on ", LOOP], ["<answer>f</answer>"]],
    "G": [["<search>" + "##".join(f"g{i}" for i in range(11)) + "</search>"], ["<answer>g</answer>"]],
    "I": [[b"<answer>\xc3", b"\xa9 \xf0\x9f", b"\x98\x80</answer>"]],
    "J": [["<search> ## </search>"], ["</search>j", "<search>j1</search>"], ["<answer>j</answer>"]],
}


def ask(letters):
    return [Question(letter[0], letter, ["x"]) for letter in letters]


def play(engine, letters, retriever=None, **changes):
    return engine.rollout(ask(letters), PROTOCOL, retriever or Fake(), temperature=0.0, **changes)


def content(episode):
    """What must not depend on how the engine went about it."""
    return [(s.source, s.text, s.ids) for s in episode.segments], episode.actions, episode.stop_reason


def check(episodes, tokenizer, limit=TOTAL, protocol=PROTOCOL):
    """What holds for every episode."""
    for episode in episodes:
        policy = [s for s in episode.segments if s.source == "policy"]
        assert episode.segments[0].source == "prompt" and len(episode.actions) == len(policy) == episode.turns
        assert all(len(s.ids) == len(s.logprobs) > 0 for s in policy)
        assert all(s.logprobs is None for s in episode.segments if s.source != "policy")
        assert episode.length() == len(ids(episode)) <= limit
        for i, segment in enumerate(episode.segments):
            if segment.source != "policy":
                assert list(segment.ids) == tokenizer(segment.text, add_special_tokens=False)["input_ids"]
            else:
                assert segment.text == tokenizer.decode(segment.ids, skip_special_tokens=True)
                action = episode.actions[[j for j, s in enumerate(episode.segments) if s.source == "policy"].index(i)]
                assert action.span[0] == i and 0 <= action.span[1] <= action.span[2] <= len(segment.text)
        again = Episode.from_text([(s.source, s.text) for s in episode.segments], protocol)
        assert again.actions == episode.actions  # a stored episode is scored as the one it was stored from


def random_questions(n):
    texts = drawn_questions(count=n)[:n]
    return [Question(f"q{i}", text, ["x"]) for i, text in enumerate(texts)]
