"""StepSearch (arXiv 2505.15107): plans, thinks and searches; warnings for invalid turns and before the last one.

Released prompt and loop: `scripts/data_process/musi_search.py`, `generation.py`. Warnings there hold literal tags,
which their scorer then reads as searches; ours hold none.
"""

import dataclasses

from parasearch_jax.protocol.base import Limits, Protocol


@dataclasses.dataclass(frozen=True)
class StepSearch(Protocol):
    def document(self, number: int, title: str, text: str) -> str:
        return f"Doc {number}<## Title: {title} ##> {text}\n"


STEP_SEARCH = StepSearch(
    name="step_search",
    prompt=(
        "Answer the question below in steps. First lay out inside <plan> and </plan> what has to be found. Then reason "
        "inside <think> and </think> whenever new information arrives. Search with <search> query </search>; the best "
        "results come back between <information> and </information>. When you know enough, give the answer inside "
        "<answer> and </answer> without explanation, for example <answer> Beijing </answer>. Question: {question}\n"
    ),
    plan=("<plan>", "</plan>"),
    notice="\n<warning>That was no valid action: write one query or one answer in its tags.</warning>\n",
    last_notice="\n<warning>No search is left: answer now.</warning>\n",
    limits=Limits(max_turns=5, max_turn_tokens=800, observation_tokens=800),
)
