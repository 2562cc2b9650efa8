"""Rewards: the registry, and what a configured reward does.

A reward is a function `(episode, question, **params)` that returns `parts`, or `(parts, steps)`:
    parts  dict[str, float]: named terms, their sum is the reward; it is placed on the last policy token
    steps  [(action index, value)]: each value is placed on the last token of that action
One registered with `group=True` is `(episodes, question, memory, **params) -> list of those`, one result an episode;
`memory` is a dict of its own that is saved with the checkpoint.

Where a method's released code does something else than its paper, that is a quirk of the reward: a name, and a line for
the log. `variant="paper"` has none of them, `"released"` all, and each can be switched by its name: a configuration
`{"name": "parallel_search", "variant": "released", "first_search": False}`. The function gets those that are on as
`quirks`, a frozenset of names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from parasearch_jax.data.types import KINDS, Question
from parasearch_jax.errors import UserError
from parasearch_jax.rollout.types import Episode

Parts = dict[str, float]
Steps = list[tuple[int, float]]

VARIANTS = ("paper", "released")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered reward function and what the trainer has to know about it."""

    name: str
    fn: Callable
    group: bool = False  # scores all samples of a question together
    needs_kind: bool = False  # reads question.kind, so it cannot score a question of unknown kind
    quirks: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> what the released code does
    lacks: Callable[[Question], str] | None = None  # what a question has not that the reward reads; "": nothing

    def params(self) -> dict[str, inspect.Parameter]:
        """The function's parameters a configuration may set, by name."""
        params = dict(list(inspect.signature(self.fn).parameters.items())[3 if self.group else 2 :])
        if self.quirks:
            del params["quirks"]
        return params


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
    variant: str = "paper"
    quirks: frozenset[str] = frozenset()  # those that are on

    def __call__(self, episode: Episode, question: Question) -> tuple[Parts, Steps]:
        """(parts, steps) of one episode. A group reward sees a group of one and an empty memory."""
        return self.score_group([episode], question, {})[0]

    def score_group(self, episodes: Sequence[Episode], question: Question, memory: dict) -> list[tuple[Parts, Steps]]:
        """(parts, steps) of each sample of one question; what the trainer calls, for group rewards and others alike.

        Raises UserError for a question that lacks something (see `check`); and where the function raises, or returns
        what is no reward (NaN, say), naming the episode, with its text.
        """
        self.check([question])
        if self.entry.needs_kind and question.kind == "unknown":
            question = dataclasses.replace(question, kind=self.unknown)
        call = functools.partial(self.entry.fn, **self.params, **({"quirks": self.quirks} if self.entry.quirks else {}))
        if self.entry.group:
            with self._told(question, episodes):
                results = list(call(episodes, question, memory))
                if len(results) != len(episodes):
                    raise ValueError(f"it gave {len(results)} results for {len(episodes)} episodes")
        out = []
        for i, episode in enumerate(episodes):
            with self._told(question, [episode]):
                result = results[i] if self.entry.group else call(episode, question)
                out.append(_parts_and_steps(result, len(episode.actions)))
        return out

    def check(self, questions: Iterable[Question]) -> None:
        """Raises UserError if the reward reads what some questions lack (a known kind, or what `Entry.lacks` names),
        with their number; call it before training."""
        questions = list(questions)
        if self.entry.lacks and (bad := [(q, lack) for q in questions if (lack := self.entry.lacks(q))]):
            raise UserError(
                f"reward {self.entry.name!r} can't score {len(bad)} of {len(questions)} questions: the first, "
                f"{bad[0][0].id!r}, has no {bad[0][1]}; leave such questions out, or use another reward"
            )
        if not self.entry.needs_kind or self.unknown is not None:
            return
        if bad := [q for q in questions if q.kind == "unknown"]:
            raise UserError(
                f"reward {self.entry.name!r} depends on the kind of a question, and {len(bad)} of {len(questions)} "
                f"questions are of unknown kind (first: {bad[0].id!r}, type {bad[0].meta.get('type')!r}); give them a "
                f"type, leave them out, or set reward.unknown to one of: {', '.join(KINDS[:-1])}"
            )

    def describe(self) -> str:
        """Name, parameters and everything in which this differs from the paper, for the log of a run."""
        settings = {"variant": self.variant} if self.entry.quirks else {}
        settings |= {k: p.default for k, p in self.entry.params().items() if p.default is not p.empty}
        settings |= dict(self.params) | ({"unknown": self.unknown} if self.unknown else {})
        listed = ", ".join(f"{k}={v}" for k, v in settings.items())
        lines = [f"released: {line} [{name}]" for name, line in self.entry.quirks.items() if name in self.quirks]
        off = [
            f"as in the paper: {name}"
            for name in self.entry.quirks
            if self.variant == "released" and name not in self.quirks
        ]
        return "\n  ".join([f"reward {self.entry.name} ({listed})", *lines, *off])

    @contextlib.contextmanager
    def _told(self, question: Question, episodes: Sequence[Episode]) -> Iterator[None]:
        """What is raised within is raised as an error that names the question, with the (first) episode's text."""
        try:
            yield
        except Exception as error:
            which = f"sample {episodes[0].sample}" if len(episodes) == 1 else f"its {len(episodes)} samples"
            theirs = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
            place = f" ({theirs[0].filename}:{theirs[0].lineno})" if theirs else ""  # in the reward function
            text = "".join(segment.text for segment in episodes[0].segments)
            raise UserError(
                f"reward {self.entry.name!r} failed on question {question.id!r}, {which}: {type(error).__name__}: "
                f"{error}{place}; mend the reward function. The text of sample {episodes[0].sample}:\n{text}"
            ) from error


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
    variant, quirks = "paper", frozenset()
    if entry.quirks:
        variant, quirks = _take_quirks(entry, params)
    elif "variant" not in entry.params() and params.get("variant") == "paper":
        del params["variant"]  # a reward without variants is its own only description
    _check_params(entry, params)
    return Reward(entry, params, unknown, variant, quirks)


def wrap(fn: Callable) -> Reward:
    """A function as a Reward: a notebook's own, `(episode, question) -> parts or (parts, steps)`, or one decorated with
    `register`, whose flags count (a group reward is one here too). Parameters: `functools.partial(fn, cost=0.1)`."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    entry = _entry_of(inner) or Entry(getattr(inner, "__name__", repr(inner)), inner)
    return Reward(dataclasses.replace(entry, fn=fn), {})


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
    return _entry_of(fn) or Entry(name, fn)


def _entry_of(fn: Callable) -> Entry | None:
    return next((entry for entry in REGISTRY.values() if entry.fn is fn), None)


def _take_quirks(entry: Entry, params: dict[str, Any]) -> tuple[str, frozenset[str]]:
    """Takes the variant and the switches of single quirks out of `params`: (variant, the quirks that are on)."""
    variant = params.pop("variant", "paper")
    if variant not in VARIANTS:
        raise UserError(f"reward {entry.name!r} has no variant {variant!r}; use one of: {', '.join(VARIANTS)}")
    on = set(entry.quirks) if variant == "released" else set()
    for name in entry.quirks:
        value = params.pop(name, name in on)
        if not isinstance(value, bool):
            raise UserError(f"reward {entry.name!r}: {name} is {value!r}; use True (as released) or False (as paper)")
        on = on | {name} if value else on - {name}
    return variant, frozenset(on)


def _check_params(entry: Entry, params: Mapping[str, Any]) -> None:
    known = entry.params()
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    variants = ["variant", *entry.quirks] if entry.quirks else []
    names = [*variants, *known, *(["unknown"] if entry.needs_kind else [])]
    for key, value in params.items():
        if key not in known and not open_ended:
            raise UserError(f"reward {entry.name!r} has no parameter {key!r}; known: {', '.join(names) or 'none'}")
        number = key in known and isinstance(known[key].default, float)
        if number and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise UserError(f"reward {entry.name!r}: {key} is {value!r}; give a finite number")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in params and parameter.kind not in _VARIADIC:
            raise UserError(f"reward {entry.name!r} needs parameter {key!r}, which has no default; set reward.{key}")


def _parts_and_steps(result: Any, actions: int) -> tuple[Parts, Steps]:
    parts, steps = result if isinstance(result, tuple) else (result, [])
    if not isinstance(parts, Mapping):
        raise ValueError(f"it returned {result!r}; return a dict of named parts, or (parts, steps)")
    for part, value in [*parts.items(), *steps]:
        if not math.isfinite(value):
            raise ValueError(f"part or step {part!r} is {value}; it must be finite")
    if bad := [i for i, _ in steps if not 0 <= i < actions]:
        raise ValueError(f"it rewards action {bad[0]}, but the episode has {actions} actions, counted from 0")
    return {part: float(value) for part, value in parts.items()}, [(int(i), float(value)) for i, value in steps]
