"""Agents without a retriever: R1 (Search-R1's baseline), direct answers and chain of thought.

`direct` and `cot` are baselines for evaluation; "naive generation" is `direct` in FlashRAG's sense, the answer alone.
"""

from parasearch_jax.protocol.base import Limits, Protocol

NO_SEARCH = Protocol(
    name="no_search",
    prompt=(
        "Answer the question below. First reason inside <think> and </think>, then give the answer inside <answer> and "
        "</answer> without explanation, for example <answer> Beijing </answer>. Question: {question}\n"
    ),
    search=None,
    notice="\nThat was no answer. Answer.\n",
    limits=Limits(max_turns=0),
)

DIRECT = Protocol(
    name="direct",
    prompt="Answer the question from what you know. Give only the answer.\nQuestion: {question}\nAnswer:",
    search=None,
    answer=("", "\n"),
    think=None,
    open_end=("answer",),
    thought="",
    limits=Limits(max_turns=0, max_turn_tokens=32),
)

COT = Protocol(
    name="cot",
    prompt=(
        "Answer the question. Think step by step, then end with one line: So the answer is: and the answer alone.\n"
        "Question: {question}\n"
    ),
    search=None,
    answer=("So the answer is:", "\n"),
    think=None,
    open_end=("answer",),
    thought="",
    limits=Limits(max_turns=0, max_turn_tokens=256),
)
