"""An agent from disk: a model with the protocol, retriever and limits it was trained with; for `serve` and `chat`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model
from parasearch_jax.models.weights import read_json
from parasearch_jax.protocol import Protocol, get_protocol
from parasearch_jax.retrieval import open_retriever
from parasearch_jax.rollout.engine import Engine, RolloutConfig
from parasearch_jax.rollout.types import Answer, Episode
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

SECTIONS = ("model", "protocol", "retriever", "rollout")  # of a run's config.json; a model's has none of them
# Not for an agent: it always goes on with the other slots while one waits for documents.
LIMITS = {field.name: field.default for field in dataclasses.fields(RolloutConfig) if field.name != "deterministic"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to open. `name` is what the model is called; `retriever` is what `open_retriever` takes."""

    name: str
    model: str
    dtype: str
    protocol: Protocol
    retriever: Mapping[str, Any] | str
    rollout: RolloutConfig
    mesh: MeshConfig
    seed: int


# ------------------------------------------------------------------------------------------------------------- settings


def make_parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the flags that `read_settings` reads; `defaults` must name the slots."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="a model directory, a run's work directory, a .gguf file")
    parser.add_argument("--retriever", help="a mapping in JSON, or a .json file with one; default: the run's")
    parser.add_argument("--protocol", help="default: the run's, or parallel")
    parser.add_argument("--prompt", help="template with {question}; default: the run's, or the protocol's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of products; default: the run's, or float32")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    for name in ("fsdp", "tp"):
        parser.add_argument(f"--{name}", type=int, default=1, help="devices, as in a run's mesh")
    for name, default in LIMITS.items():
        if name != "slots":
            values = ("paper", "released") if name == "observation_variant" else None
            told = f"default: the run's, or {default}"
            parser.add_argument(f"--{name}", type=type(default), choices=values, help=told)
    parser.set_defaults(**defaults)
    return parser


def read_settings(args: argparse.Namespace) -> Settings:
    """The flags, and for what they leave open the configuration of the run that `args.model` belongs to, if it does.

    Raises UserError for a missing retriever, an unknown protocol, a configuration that this version can't read.
    """
    run = find_run(args.model)
    retriever = _retriever(args.retriever) if args.retriever else run.get("retriever")
    if retriever is None:
        raise UserError(
            f"--retriever is missing, and {args.model} is no run's work directory that names one. Give a mapping in "
            'JSON, or a .json file with one: {"kind": "local", "corpus": "corpus.jsonl", "encoder": "hashed"}'
        )
    return Settings(
        name=_name(args.model, run),
        model=args.model,
        dtype=args.dtype or run.get("model", {}).get("dtype", "float32"),
        protocol=_protocol(args, run),
        retriever=retriever,
        rollout=_rollout(args, run, retriever),
        mesh=MeshConfig(fsdp=args.fsdp, tp=args.tp),
        seed=args.seed,
    )


def find_run(model: str) -> dict[str, Any]:
    """The configuration of the run whose work directory, or whose `model/`, this is; {} if it is none."""
    path = Path(model).expanduser().absolute()
    for directory in (path, path.parent) if path.name == "model" else (path,):
        if (directory / "config.json").exists():
            found = read_json(directory / "config.json")
            if isinstance(found, dict) and all(isinstance(found.get(section), dict) for section in SECTIONS):
                return found
    return {}


def _name(model: str, run: Mapping) -> str:
    """runs/parallel_tiny and runs/parallel_tiny/model -> "parallel_tiny"; a name on the hub is its own."""
    path = Path(model).expanduser().absolute()
    if not path.exists():
        return model
    return path.parent.name if run and path.name == "model" else path.stem if path.is_file() else path.name


def _retriever(given: str) -> Mapping[str, Any] | str:
    if given.lstrip().startswith("{"):
        text, where = given, "--retriever"
    elif given.endswith(".json") and Path(given).is_file():
        text, where = Path(given).read_text(encoding="utf-8"), given
    else:
        return given
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f'{where} must hold a mapping such as {{"kind": "local", ...}}, it holds {text.strip():.80}')
    return found


def _protocol(args: argparse.Namespace, run: Mapping) -> Protocol:
    section = run.get("protocol", {}) if args.protocol is None else {"name": args.protocol}
    changes = {key: value for key, value in section.items() if key != "name" and value not in (None, "")}
    if args.prompt is not None:
        changes["prompt"] = args.prompt
    try:
        return get_protocol(section.get("name", "parallel"), **changes)
    except TypeError as error:
        raise UserError(f"the run of {args.model} has a protocol that this version can't read: {error}") from None


def _rollout(args: argparse.Namespace, run: Mapping, retriever: Mapping | str) -> RolloutConfig:
    section = dict(run.get("rollout", {}))
    if unknown := sorted(set(section) - set(LIMITS) - {"deterministic"}):
        raise UserError(f"the run of {args.model} has rollout.{unknown[0]}, which this version does not know")
    for source in (run.get("retriever", {}), retriever if isinstance(retriever, Mapping) else {}):
        section |= {"topk": source["topk"]} if source.get("topk") is not None else {}
    section |= {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    return RolloutConfig(**section | {"deterministic": False})


# ---------------------------------------------------------------------------------------------------------------- agent


@dataclasses.dataclass(frozen=True)
class Agent:
    """What answers questions: an open session of an engine, and how questions become prompts."""

    settings: Settings
    tokenizer: Any
    session: Any

    def tokens(self, prompt: str) -> int:
        """Tokens of a prompt as the engine encodes it."""
        return len(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that the model gets for {"role", "content"} messages, of which the last is the user's question.

        That one is put in the protocol's prompt, as in training; earlier ones stand as they are, which takes a chat
        template. Raises UserError where they can't be rendered.
        """
        *earlier, last = messages
        return self.settings.protocol.render(self.tokenizer, last["content"], earlier)


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[Agent]:
    """Loads everything; at the end, episodes under way are cancelled and all threads end."""
    with contextlib.ExitStack() as stack:
        retriever = open_retriever(settings.retriever)
        stack.callback(retriever.close_sync)
        mesh = make_mesh(settings.mesh)
        model = load_model(settings.model, mesh, settings.dtype)
        engine = Engine(model, settings.rollout, seed=settings.seed, mesh=mesh)
        stack.callback(engine.close)
        model.params = None  # the engine has its own
        session = stack.enter_context(engine.session(settings.protocol, retriever))
        yield Agent(settings, model.tokenizer, session)


# ---------------------------------------------------------------------------------------------------------------- trace


class Trace:
    """Cuts an episode's text, as it comes, into pieces (kind, text): thought, query, docs, notice, answer.

    Those before the answer, joined, are the episode's text up to it, tags and all. The answer comes last and bare. It
    is held back until it stands: a block that is not closed, or that another tag breaks into, is none.
    """

    def __init__(self, protocol: Protocol):
        self._answer, (search, close) = protocol.answer[0], protocol.search or ("\0", "\0")
        self._search = re.compile(f"{re.escape(search)}.*?(?:{re.escape(close)}|\\Z)", re.DOTALL)
        self._openings = (self._answer, search)
        self._turn, self._told = "", 0  # text of the turn under way, and how much of it was given out

    def feed(self, source: str, text: str) -> list[tuple[str, str]]:
        """The pieces that stand with this text of a segment of `source` ("policy", "docs", "notice")."""
        if source != "policy":
            pieces = self._give(len(self._turn))
            self._turn, self._told = "", 0
            return [*pieces, (source, text)]
        self._turn += text
        stands = self._turn.find(self._answer)
        if stands < 0:  # what may be the start of a tag waits
            longest = max(map(len, self._openings)) - 1
            ends = (self._turn[-n:] for n in range(min(longest, len(self._turn)), 0, -1))
            held = next((end for end in ends if any(tag.startswith(end) for tag in self._openings)), "")
            stands = len(self._turn) - len(held)
        return self._give(stands)

    def end(self, episode: Episode) -> list[tuple[str, str]]:
        """The last pieces of an episode that has ended, its answer with them."""
        action = episode.actions[-1] if episode.actions else None
        if not isinstance(action, Answer):
            return self._give(len(self._turn))
        return [*self._give(action.span[1]), ("answer", action.text)]

    def _give(self, stands: int) -> list[tuple[str, str]]:
        """The text of the turn up to `stands` that was not given out, cut at searches."""
        pieces, start = [], self._told
        for match in self._search.finditer(self._turn):
            for kind, end in (("thought", match.start()), ("query", match.end())):
                end = min(end, stands)
                if end > start:
                    pieces.append((kind, self._turn[start:end]))
                    start = end
        if stands > start:
            pieces.append(("thought", self._turn[start:stands]))
        self._told = max(start, stands)
        return pieces


def replay(protocol: Protocol, episode: Episode) -> list[tuple[str, str]]:
    """The pieces of an episode that has ended."""
    trace = Trace(protocol)
    fed = [piece for s in episode.segments if s.source != "prompt" for piece in trace.feed(s.source, s.text)]
    return fed + trace.end(episode)
