"""The small world as configs/parallel_tiny.py has it: base checkpoint, questions, corpus, FAISS and limits."""

import functools
from typing import NamedTuple

import parallel_tiny

from parasearch_jax.data import Question, load_question_sets
from parasearch_jax.models import Model, load_model
from parasearch_jax.protocol import Protocol, get_protocol
from parasearch_jax.retrieval import Retriever, open_retriever
from parasearch_jax.rollout import RolloutConfig


class SmallWorld(NamedTuple):
    model: Model
    questions: list[Question]
    protocol: Protocol
    retriever: Retriever
    limits: RolloutConfig


@functools.cache
def load() -> SmallWorld:
    config = parallel_tiny.get_config()
    protocol = get_protocol(config.protocol.name, prompt=config.protocol.prompt)
    limits = RolloutConfig(**config.rollout, topk=config.retriever.topk)
    questions = load_question_sets(config.data.train)
    return SmallWorld(load_model(config.model.path), questions, protocol, open_retriever(config.retriever), limits)
