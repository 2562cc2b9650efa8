"""Protocols by name: the tags, prompts and parsing of each agent family."""

import dataclasses

from parasearch_jax.errors import UserError
from parasearch_jax.protocol.base import Parsed, Protocol
from parasearch_jax.protocol.parallel import PARALLEL
from parasearch_jax.protocol.search_r1 import SEARCH_R1

PROTOCOLS = {p.name: p for p in (PARALLEL, SEARCH_R1)}


def get_protocol(protocol: str | Protocol, **changes) -> Protocol:
    """A Protocol by name (or itself), with some fields changed. Raises UserError for an unknown name."""
    if isinstance(protocol, str):
        if protocol not in PROTOCOLS:
            raise UserError(f"protocol {protocol!r} is unknown; use one of: {', '.join(sorted(PROTOCOLS))}")
        protocol = PROTOCOLS[protocol]
    return dataclasses.replace(protocol, **changes)


__all__ = ["PROTOCOLS", "Parsed", "Protocol", "get_protocol"]
