"""Alarms: signs in the metrics that a run goes wrong, told before the days are spent; and the end of one that has.

A sign becomes an alarm when it holds for `patience` steps in a row. What users of such systems report: the reward falls
to the floor some hundred steps in, with entropy, KL, format or length giving it away long before; or nothing is learned
since all samples of a question earn the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from parasearch_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """When a step's metrics are a sign. A limit of 0 turns its sign off."""

    on_alarm: str = "warn"  # or "stop": the run ends with an error, and its signs' steps are not saved
    patience: int = 3  # steps in a row
    refused: int = 5  # updates in a row that were not finite: the run ends, whatever on_alarm says
    min_entropy: float = 0.1  # as a share of the first step's
    max_kl: float = 1.0  # to the reference, nats a token
    max_invalid: float = 0.5  # share of episodes without a valid format
    max_flat_groups: float = 0.95  # share of groups in which all rewards are equal; of one sample a question: off
    max_truncated: float = 0.5  # share of episodes that end with `length`
    max_fall: float = 0.5  # nats a token that the log-prob of well rewarded episodes lies below its best so far

    def __post_init__(self):
        if self.on_alarm not in ("warn", "stop"):
            raise UserError(f"guard.on_alarm is {self.on_alarm!r}; use one of: warn, stop")
        for name in ("patience", "refused"):
            if getattr(self, name) < 1:
                raise UserError(f"guard.{name} is {getattr(self, name)}, it must be >= 1")


class GuardError(UserError):
    """The run was ended by a guard."""


class Guard:
    """Looks at one step after the other. What it remembers follows from the metrics: a continued run shows it those of
    its earlier steps."""

    def __init__(self, config: GuardConfig, samples: int, updates: int, earlier: Iterable[Mapping[str, float]] = ()):
        """`samples` of a question and optimizer steps (`updates`) of a batch; `earlier`: lines of metrics.jsonl."""
        self._config, self._samples, self._updates = config, samples, updates
        self._first_entropy: float | None = None
        self._best_logprob: float | None = None
        self._in_a_row: dict[str, int] = {}
        self._skipped, self._refused = 0.0, 0.0
        for line in earlier:
            self.look(line)

    @property
    def stops(self) -> bool:
        """Whether an alarm ends the run."""
        return self._config.on_alarm == "stop"

    def look(self, line: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """(signs of this step, new alarms), each told in a sentence."""
        signs = {name: told for name, told in self._signs(line) if told}
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in signs}
        self._refused = self._refused + self._new(line) if self._new(line) >= self._updates else 0
        self._skipped = line.get("skipped", 0.0)
        alarms = [told for name, told in signs.items() if self._in_a_row[name] == self._config.patience]
        return list(signs.values()), alarms

    def check(self, alarms: list[str], kept: int) -> None:
        """Raises GuardError if the run has to end; `kept` is the step of the last checkpoint."""
        behind = f"the last checkpoint is of step {kept}"
        if self._refused >= self._config.refused:
            raise GuardError(
                f"{self._refused:.0f} updates in a row were refused, as loss or gradient was not finite: {behind}. "
                "Lower the learning rate, or look at the episodes of the step"
            )
        if alarms and self.stops:
            raise GuardError(f"{'; '.join(alarms)} (guard.on_alarm=stop): {behind}")

    def _new(self, line: Mapping[str, float]) -> float:
        return line.get("skipped", 0.0) - self._skipped

    def _signs(self, line: Mapping[str, float]) -> Iterable[tuple[str, str]]:
        limits, steps = self._config, self._config.patience

        def beyond(key: str, limit: float, words: str, low: bool = False) -> str:
            value = line.get(key)
            if not limit or value is None or (value >= limit if low else value <= limit):
                return ""
            return f"{words} ({key} {value:.3g}, limit {limit:.3g}, {steps} steps in a row)"

        if self._first_entropy is None:
            self._first_entropy = line.get("entropy")
        if (logprob := line.get("rollout/rewarded_logprob")) is not None:
            self._best_logprob = logprob if self._best_logprob is None else max(self._best_logprob, logprob)
        floor = limits.min_entropy * (self._first_entropy or 0.0)
        lowest = limits.max_fall and (self._best_logprob or 0.0) - limits.max_fall
        yield "entropy", beyond("entropy", floor, "the entropy has collapsed", low=True)
        yield "kl", beyond("kl", limits.max_kl, "the policy has left its reference")
        lowest_valid, words = limits.max_invalid and 1 - limits.max_invalid, "most episodes have no valid format"
        yield "invalid", beyond("rollout/valid_format", lowest_valid, words, low=True)
        if self._samples > 1:
            flat = "in nearly all groups all samples earn the same, which teaches nothing"
            yield "flat groups", beyond("rollout/groups_without_spread", limits.max_flat_groups, flat)
        yield "truncated", beyond("rollout/stop_length", limits.max_truncated, "most episodes end by their length")
        fall = "episodes that earn well have become unlikelier"
        yield "rewarded", beyond("rollout/rewarded_logprob", lowest, fall, low=True)
