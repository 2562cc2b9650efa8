r"""What a base checkpoint of the small world can do as each agent, against what it has to.

    python -m parasearch_jax.toy.measure --model=parasearch_jax/toy/base [--protocols=parallel,otc]

Greedy with the real retriever; with every document emptied (what is left is guessing); with the documents of a world of
the same names and other facts (the answers must follow the documents); and sampled at temperature 1.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from parasearch_jax.data import Question
from parasearch_jax.data.metrics import em
from parasearch_jax.evaluate import summarize
from parasearch_jax.models import Model, load_model
from parasearch_jax.protocol import PROTOCOLS, Protocol
from parasearch_jax.retrieval import Document, LocalRetriever, Retriever
from parasearch_jax.retrieval.hashed import HashedConfig, HashedEncoder
from parasearch_jax.retrieval.index import FlatIndex
from parasearch_jax.rollout import Engine, Episode, RolloutConfig
from parasearch_jax.toy import world
from parasearch_jax.toy.questions import answer_in, question_rows, split_tasks
from parasearch_jax.toy.recipe import toy_protocol

RETRIEVER = HashedConfig(dim=32, char_weight=0.7)  # as configs/parallel_tiny.py
ROLLOUT = RolloutConfig(
    slots=64, chunk=8, max_turn_tokens=40, max_total_tokens=320, observation_tokens=120, topk=1
)  # as configs/parallel_tiny.py

REQUIRED = {  # name -> (lowest, highest)
    "em single": (0.90, 1),
    "em sequential": (0.85, 1),
    "em parallel": (0.80, 1),
    "em single, hit": (0.95, 1),
    "em sequential, hit": (0.95, 1),
    "em parallel, hit": (0.85, 1),
    "em single, documents emptied": (0, 0.10),
    "follows swapped documents": (0.90, 1),
    "sampled: dr parallel": (10, 35),
    "sampled: invalid format": (0.10, 0.40),
}


class Nothing(Retriever):
    """Finds no document for any query."""

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        return [[] for _ in queries]


def local_retriever(drawn: world.World) -> LocalRetriever:
    """The retriever of the tiny configuration over a world's documents."""
    documents = [Document(row["id"], row["contents"]) for row in world.corpus_rows(drawn)]
    encoder = HashedEncoder([d.contents for d in documents], RETRIEVER)
    index = FlatIndex(RETRIEVER.dim)
    index.add(encoder.encode([d.contents for d in documents], kind="passage"))
    return LocalRetriever(documents, encoder, index)


def required(protocol: Protocol) -> dict[str, tuple[float, float]]:
    """What of `REQUIRED` an agent can be asked for: one that splits no question has no DR, one whose thoughts have no
    tags is seldom ill-formed, and one that writes no query finds what its question happens to find."""
    if protocol.search is None:
        return {}
    out = dict(REQUIRED)
    if protocol.separator is None:
        del out["sampled: dr parallel"]
    if protocol.thought != "turn":
        del out["sampled: invalid format"]
    return out


def limits(protocol: Protocol) -> RolloutConfig:
    """The tiny configuration's, with no more turns than the agent has."""
    return dataclasses.replace(ROLLOUT, max_turns=min(ROLLOUT.max_turns, protocol.limits.max_turns))


def was_hit(episode: Episode, support: Sequence[str]) -> bool:
    """Whether the documents of all support titles were shown, or what an extra call told of them."""
    protocol, shown = episode.protocol, "".join(s.text for s in episode.segments if s.source == "docs")
    heads = [f"{t}:" if protocol.distil else protocol.document(1, t, "").strip() for t in support]
    return all(head in shown for head in heads)


def measure(model: Model, protocol: Protocol, seed: int = 0) -> dict[str, float]:
    """Every figure of `REQUIRED`, and some more, over the test questions of the world of `seed`."""
    engine = Engine(model, limits(protocol))
    drawn = world.make_world(seed)
    tasks = split_tasks(drawn, seed)["test"]
    questions = [
        Question(row["id"], row["question"], row["golden_answers"], task.kind, meta=row["metadata"])
        for row, task in zip(question_rows("test", tasks), tasks, strict=True)
    ]
    retriever = local_retriever(drawn)
    greedy = engine.rollout(questions, protocol, retriever, temperature=0.0)
    out = _by_kind(greedy, questions, protocol)
    single = [q for q in questions if q.kind == "single"]
    guessed = engine.rollout(single, protocol, Nothing(), temperature=0.0)
    out["em single, documents emptied"] = _mean_em(guessed, [q.golden_answers for q in single])
    swapped = world.swap_facts(drawn, "swapped")
    followed = engine.rollout(questions, protocol, local_retriever(swapped), temperature=0.0)
    out["follows swapped documents"] = _mean_em(followed, [(answer_in(swapped, task),) for task in tasks])
    sampled = summarize(engine.rollout(questions, protocol, retriever, step=1), questions, protocol)
    out |= {f"sampled: dr {kind}": sampled[kind]["dr"] for kind in ("parallel", "sequential", "single")}
    out["sampled: invalid format"] = 1 - sampled["all"]["valid_format"]
    out["sampled: em"] = sampled["all"]["em"]
    engine.close()
    return out


def _by_kind(episodes: Sequence[Episode], questions: Sequence[Question], protocol: Protocol) -> dict[str, float]:
    subsets, out = summarize(episodes, questions, protocol), {}
    for kind in ("single", "sequential", "parallel"):
        asked = [(e, q) for e, q in zip(episodes, questions, strict=True) if q.kind == kind]
        hit = [(e, q) for e, q in asked if was_hit(e, q.meta["support"])]
        out[f"em {kind}"] = subsets[kind]["em"]
        out[f"em {kind}, hit"] = _mean_em([e for e, _ in hit], [q.golden_answers for _, q in hit])
        out[f"hit {kind}"] = len(hit) / len(asked)
        out[f"turns {kind}"] = subsets[kind]["turns"]
        out[f"dr {kind}"] = subsets[kind]["dr"]
    return out


def _mean_em(episodes: Sequence[Episode], golds: Sequence[Sequence[str]]) -> float:
    return float(np.mean([em(e.answer, g) for e, g in zip(episodes, golds, strict=True)]))


def missed(protocol: Protocol, measured: dict[str, float]) -> list[str]:
    """The requirements that are not met, each in words."""
    return [
        f"{protocol.name}: {name} is {measured[name]:.3f}, required {low} to {high}"
        for name, (low, high) in required(protocol).items()
        if not low <= measured[name] <= high
    ]


def main(argv: list[str]) -> None:
    del argv
    model, faults = load_model(flags.FLAGS.model), []
    for name in flags.FLAGS.protocols or PROTOCOLS:
        protocol = toy_protocol(name)
        measured = measure(model, protocol)
        print(json.dumps({"protocol": name} | {key: round(value, 4) for key, value in measured.items()}), flush=True)
        faults += missed(protocol, measured)
    if faults:
        sys.exit("missed: " + "; ".join(faults))


if __name__ == "__main__":
    flags.DEFINE_string("model", None, "Model directory.", required=True)
    flags.DEFINE_list("protocols", None, "Agents; default: all.")
    app.run(main)
