"""Search-R1 (arXiv 2503.09516): one query a search. ZeroSearch (arXiv 2505.04588) has the same conversation, with five
documents a search and a simulated engine (`rollout.max_turns=5`, `retriever.topk=5`)."""

from parasearch_jax.protocol.base import Protocol

SEARCH_R1 = Protocol(
    name="search_r1",
    prompt=(
        "Answer the question below. Whenever new information arrives, reason about it inside <think> and </think>. If "
        "you lack knowledge, call a search engine with <search> query </search>; the best results come back between "
        "<information> and </information>. You may search as often as you need. When you need nothing more, give the "
        "answer inside <answer> and </answer> without explanation, for example <answer> Beijing </answer>. "
        "Question: {question}\n"
    ),
)
