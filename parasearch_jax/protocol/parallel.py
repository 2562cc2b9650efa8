"""ParallelSearch (arXiv 2508.09303): Search-R1's tags, with `##` between independent sub-queries of one search.

Search-R1 with the parallel prompt (Table 3) is a Search-R1 checkpoint evaluated with this protocol.
"""

from parasearch_jax.protocol.base import Protocol

PARALLEL = Protocol(
    name="parallel",
    prompt=(
        "Answer the question below. Whenever new information arrives, reason about it inside <think> and </think>. If "
        "you lack knowledge, call a search engine with <search> query </search>; the best results come back between "
        "<information> and </information>. You may search as often as you need. If the question has several "
        "independent parts, split it and send the parts in one search, separated by ##, for example "
        "<search> part 1 ## part 2 </search>. When you need nothing more, give the answer inside <answer> and "
        "</answer> without explanation, for example <answer> Beijing </answer>. Question: {question}\n"
    ),
    separator="##",
)
