"""What both sides of benchmarks/train_step.py are given: numpy only, since the peer's Python has no JAX.

Axes: B rows, T tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np

ADAM = {"lr": 1e-4, "b1": 0.9, "b2": 0.999, "decay": 0.01}  # epsilon 1e-8 on both sides
CLIP_NORM, CLIP, KL, REWARD_KL, VALUE_CLIP = (
    1.0,
    0.2,
    0.001,
    0.001,
    0.5,
)  # as configs/common.py, configs/parallel_base.py
STEPS = 5  # whose losses must agree


@dataclasses.dataclass(frozen=True)
class Job:
    """Rows that are full: a prompt, then turns of the policy with documents between them, of random lengths."""

    rows: int = 8
    tokens: int = 1024
    prompt: int = 200
    documents: float = 0.4  # of all tokens
    turns: int = 4
    vocab: int = 32768

    @property
    def size(self) -> int:
        return self.rows * self.tokens

    def ids(self) -> np.ndarray:
        """int32 [B,T]"""
        return np.random.default_rng(0).integers(0, self.vocab, (self.rows, self.tokens)).astype(np.int32)

    def segments(self) -> list[list[tuple[str, int]]]:
        """Of each row (source, tokens): prompt, policy, docs, policy, ... policy."""
        rng, out = np.random.default_rng(1), []
        documents = _cut(rng, round(self.documents * self.size), self.rows, spread=0.3)
        for docs in documents:
            policy = self.tokens - self.prompt - docs
            said, read = _cut(rng, policy, self.turns), _cut(rng, docs, self.turns - 1)
            row = [("prompt", self.prompt), ("policy", said[0])]
            for n, m in zip(read, said[1:], strict=True):
                row += [("docs", n), ("policy", m)]
            out.append(row)
        return out

    def rewards(self) -> np.ndarray:
        """float32 [B], no two alike: an episode's whole reward, which stands on its last token."""
        return np.random.default_rng(2).permutation(self.rows).astype(np.float32) / self.rows

    def policy_mask(self) -> np.ndarray:
        """bool [B,T]"""
        return self._mask("policy")

    def response_mask(self) -> np.ndarray:
        """bool [B,T]: all that stands behind the prompt."""
        return self._mask("policy", "docs")

    def _mask(self, *sources: str) -> np.ndarray:
        rows = [[np.full(n, source in sources) for source, n in row] for row in self.segments()]
        return np.stack([np.concatenate(row) for row in rows])


def _cut(rng: np.random.Generator, total: int, parts: int, spread: float = 0.5) -> list[int]:
    """`total` in so many parts, each up to `spread` more or less than the mean."""
    shares = 1 + spread * rng.uniform(-1, 1, parts)
    ends = np.round(total * shares.cumsum() / shares.sum()).astype(int)
    return np.diff(ends, prepend=0).tolist()
