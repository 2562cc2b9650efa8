"""Protocols by name: the tags, prompts and parsing of each agent family."""

import dataclasses

from parasearch_jax.errors import UserError
from parasearch_jax.protocol.base import DOCUMENTS, Limits, Parsed, Protocol, Turn
from parasearch_jax.protocol.no_search import COT, DIRECT, NO_SEARCH
from parasearch_jax.protocol.otc import OTC
from parasearch_jax.protocol.parallel import PARALLEL
from parasearch_jax.protocol.r1_searcher import R1_SEARCHER
from parasearch_jax.protocol.rag import IRCOT, ITER_RETGEN, RAG
from parasearch_jax.protocol.search_o1 import SEARCH_O1
from parasearch_jax.protocol.search_r1 import SEARCH_R1
from parasearch_jax.protocol.self_ask import SELF_ASK
from parasearch_jax.protocol.step_search import STEP_SEARCH

TRAINED = (PARALLEL, SEARCH_R1, NO_SEARCH, OTC, STEP_SEARCH, R1_SEARCHER)  # by reinforcement learning in their papers
PROTOCOLS = {p.name: p for p in (*TRAINED, SEARCH_O1, SELF_ASK, ITER_RETGEN, IRCOT, RAG, DIRECT, COT)}


def get_protocol(protocol: str | Protocol, **changes) -> Protocol:
    """A Protocol by name (or itself), with some fields changed. Raises UserError for an unknown name or field.

    A `prompt`, or the template in the file `prompt_file`, stands in the chat form too unless `user` is given with it.
    """
    if isinstance(protocol, str):
        if protocol not in PROTOCOLS:
            raise UserError(f"protocol {protocol!r} is unknown; use one of: {', '.join(sorted(PROTOCOLS))}")
        protocol = PROTOCOLS[protocol]
    if file := changes.pop("prompt_file", ""):
        changes["prompt"] = _read(file)
    if "prompt" in changes:
        changes = {"user": ""} | changes
    known = [field.name for field in dataclasses.fields(protocol)]
    if unknown := sorted(set(changes) - set(known)):
        raise UserError(f"protocol {protocol.name!r} has no {unknown[0]!r}; it has: {', '.join(known)}")
    return dataclasses.replace(protocol, **changes)


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"protocol.prompt_file {file!r} cannot be read ({error}); give a text file") from None


__all__ = ["DOCUMENTS", "PROTOCOLS", "TRAINED", "Limits", "Parsed", "Protocol", "Turn", "get_protocol"]
