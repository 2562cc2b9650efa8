"""Rewards: the registry, and what a configured reward does.

A reward is a function `(episode, question, **params)` that returns `parts`, or `(parts, steps)`:
    parts  dict[str, float]: named terms, their sum is the reward; it is placed on the last policy token
    steps  [(action index, value)]: each value is placed on the last token of that action
One registered with `group=True` is `(episodes, question, memory, **params) -> list of those`, one result an episode;
`memory` is a dict of its own that is saved with the checkpoint.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from parasearch_jax.data.types import KINDS, Question
from parasearch_jax.errors import UserError
from parasearch_jax.rollout.types import Episode

Parts = dict[str, float]
Steps = list[tuple[int, float]]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered reward function and what the trainer has to know about it."""

    name: str
    fn: Callable
    group: bool = False  # scores all samples of a question together
    needs_kind: bool = False  # reads question.kind, so it cannot score a question of unknown kind
    variants: tuple[str, ...] = ()  # accepted values of `variant`; empty: not checked here
    differs: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # variant -> lines for the log

    def params(self) -> dict[str, inspect.Parameter]:
        """The function's parameters a configuration may set, by name."""
        return dict(list(inspect.signature(self.fn).parameters.items())[3 if self.group else 2 :])


REGISTRY: dict[str, Entry] = {}


def register(name: str, **flags) -> Callable[[Callable], Callable]:
    """Decorator: makes a function known as `config.reward.name`. `flags` are the fields of `Entry`.

    Defining the same function again (a notebook cell run twice) replaces it; a name taken by another raises ValueError.
    """

    def add(fn: Callable) -> Callable:
        old = REGISTRY.get(name)
        if old and (old.fn.__module__, old.fn.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"reward name {name!r} is taken by {old.fn.__module__}.{old.fn.__qualname__}; use another")
        REGISTRY[name] = Entry(name, fn, **flags)
        return fn

    return add


@dataclasses.dataclass(frozen=True)
class Reward:
    """A reward with its parameters. `unknown` is the kind taken for questions of unknown kind."""

    entry: Entry
    params: Mapping[str, Any]
    unknown: str | None = None

    def __call__(self, episode: Episode, question: Question) -> tuple[Parts, Steps]:
        """(parts, steps) of one episode. A group reward sees a group of one and an empty memory."""
        return self.score_group([episode], question, {})[0]

    def score_group(self, episodes: Sequence[Episode], question: Question, memory: dict) -> list[tuple[Parts, Steps]]:
        """(parts, steps) of each sample of one question; what the trainer calls, for group rewards and others alike.

        Raises UserError for a question of unknown kind (see `check`), ValueError for a result that is no reward.
        """
        self.check([question])
        if self.entry.needs_kind and question.kind == "unknown":
            question = dataclasses.replace(question, kind=self.unknown)
        if self.entry.group:
            results = list(self.entry.fn(episodes, question, memory, **self.params))
        else:
            results = [self.entry.fn(episode, question, **self.params) for episode in episodes]
        if len(results) != len(episodes):
            raise ValueError(f"reward {self.entry.name!r} gave {len(results)} results for {len(episodes)} episodes")
        return [_parts_and_steps(result, self.entry.name) for result in results]

    def check(self, questions: Iterable[Question]) -> None:
        """Raises UserError if the reward depends on the kind and some questions have none; call it before training."""
        if not self.entry.needs_kind or self.unknown is not None:
            return
        questions = list(questions)
        bad = [q for q in questions if q.kind == "unknown"]
        if bad:
            raise UserError(
                f"reward {self.entry.name!r} depends on the kind of a question, and {len(bad)} of {len(questions)} "
                f"questions are of unknown kind (first: {bad[0].id!r}, type {bad[0].meta.get('type')!r}); give them a "
                f"type, leave them out, or set reward.unknown to one of: {', '.join(KINDS[:-1])}"
            )

    def describe(self) -> str:
        """Name, parameters and everything in which the variant differs from the paper, for the log of a run."""
        variant = self.params.get("variant", "paper")
        settings = ", ".join(f"{k}={v}" for k, v in self._settings().items())
        return "\n  ".join([f"reward {self.entry.name} ({settings})", *self.entry.differs.get(variant, ())])

    def _settings(self) -> dict[str, Any]:
        defaults = {k: p.default for k, p in self.entry.params().items() if p.default is not p.empty}
        return defaults | dict(self.params) | ({"unknown": self.unknown} if self.unknown else {})


def make_reward(config: Mapping[str, Any] | str) -> Reward:
    """The reward of `config.reward`: `{"name": ..., **params}` or a name alone; a name is registered or
    "package.module:function". Call the result with (episode, question) for (parts, steps).

    `unknown` (for rewards that depend on the kind) names the kind to take for questions of unknown kind.
    Raises UserError for an unknown name, parameter, variant or kind, listing the known ones.
    """
    params = {"name": config} if isinstance(config, str) else dict(config)
    if not params.get("name"):
        raise UserError(f"reward config {params} has no 'name'; use one of: {', '.join(sorted(REGISTRY))}")
    entry = _find(params.pop("name"))
    unknown = params.pop("unknown", None) if entry.needs_kind else None
    if unknown is not None and unknown not in KINDS[:-1]:
        raise UserError(f"reward.unknown is {unknown!r}; use one of: {', '.join(KINDS[:-1])}")
    if "variant" not in entry.params() and params.get("variant") == "paper":
        del params["variant"]  # a reward without variants is its own only description
    _check_params(entry, params)
    return Reward(entry, params, unknown)


def wrap(fn: Callable) -> Reward:
    """A plain function `(episode, question) -> parts or (parts, steps)` as a Reward: a notebook's own."""
    return Reward(Entry(getattr(fn, "__name__", repr(fn)), fn), {})


def score(name: str, episode: Episode, question: Question, variant: str = "paper", **params) -> Parts:
    """The parts of one episode under a reward; their sum is the reward. Errors as in `make_reward`."""
    return make_reward({"name": name, "variant": variant, **params})(episode, question)[0]


def _find(name: str) -> Entry:
    if ":" not in name:
        if name not in REGISTRY:
            known = ", ".join(sorted(REGISTRY))
            raise UserError(f'reward {name!r} is unknown; use one of: {known}, or "package.module:function"')
        return REGISTRY[name]
    module, _, function = name.partition(":")
    try:
        fn = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"reward {name!r} cannot be imported: {error}; check module and function") from error
    if not callable(fn):
        raise UserError(f"reward {name!r} is a {type(fn).__name__}, not a function (episode, question, **params)")
    return next((entry for entry in REGISTRY.values() if entry.fn is fn), Entry(name, fn))


def _check_params(entry: Entry, params: Mapping[str, Any]) -> None:
    known = entry.params()
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    names = [*known, *(["unknown"] if entry.needs_kind else [])]
    for key, value in params.items():
        if key not in known and not open_ended:
            raise UserError(f"reward {entry.name!r} has no parameter {key!r}; known: {', '.join(names) or 'none'}")
        number = key in known and isinstance(known[key].default, float)
        if number and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise UserError(f"reward {entry.name!r}: {key} is {value!r}; give a finite number")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in params and parameter.kind not in _VARIADIC:
            raise UserError(f"reward {entry.name!r} needs parameter {key!r}, which has no default; set reward.{key}")
    if entry.variants and params.get("variant", "paper") not in entry.variants:
        raise UserError(
            f"reward {entry.name!r} has no variant {params['variant']!r}; use one of: {', '.join(entry.variants)}"
        )


def _parts_and_steps(result: Any, name: str) -> tuple[Parts, Steps]:
    parts, steps = result if isinstance(result, tuple) else (result, [])
    if not isinstance(parts, Mapping):
        raise ValueError(f"reward {name!r} returned {result!r}; return a dict of named parts, or (parts, steps)")
    for part, value in [*parts.items(), *steps]:
        if not math.isfinite(value):
            raise ValueError(f"reward {name!r}: part or step {part!r} is {value}; it must be finite")
    return {part: float(value) for part, value in parts.items()}, [(int(i), float(value)) for i, value in steps]
