"""OTC (arXiv 2504.14870): Search-R1's conversation, with results between observation tags and a prompt that asks for
few calls."""

from parasearch_jax.protocol.base import Protocol

OTC = Protocol(
    name="otc",
    prompt=(
        "Answer the question below. Whenever new information arrives, reason about it inside <think> and </think>. If "
        "you lack knowledge, call a search engine with <search> query </search>; the best results come back between "
        "<observation> and </observation>. Make every call count, and make none that you can do without. When you need "
        "nothing more, give the answer inside <answer> and </answer> without explanation, for example "
        "<answer> Beijing </answer>. Question: {question}\n"
    ),
    docs=("<observation>", "</observation>"),
)
