"""Self-Ask (arXiv 2210.03350), the conversation of ReARTeR (arXiv 2501.07861) too: follow-up questions on lines of
their own, each of them searched for."""

from __future__ import annotations

import dataclasses

from parasearch_jax.protocol.base import Limits, Protocol


@dataclasses.dataclass(frozen=True)
class SelfAsk(Protocol):
    def observation(self, blocks) -> str:
        return f"{self.docs[0]}\n{''.join(blocks)}{self.docs[1]}"


SELF_ASK = SelfAsk(
    name="self_ask",
    prompt=(
        "Answer the question by asking what has to be known first. Write each such question on a line that begins with "
        "Follow up: and get documents on it. Write what they say on a line that begins with Intermediate answer: When "
        "you know enough, write a line that begins with So the final answer is: and give the answer alone.\n"
        "Question: {question}\n"
    ),
    search=("Follow up:", "\n"),
    answer=("So the final answer is:", "\n"),
    think=None,
    docs=("Retrieved documents:", "End of documents.\n"),
    open_end=("answer",),
    thought="",
    notice="\nAsk a follow up, or give the final answer.\n",
    limits=Limits(max_turns=5, max_turn_tokens=512),
)
