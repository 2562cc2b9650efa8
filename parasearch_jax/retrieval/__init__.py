"""Search: corpus files, encoders, indexes, and retrievers behind one asynchronous interface."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.batching import Batching
from parasearch_jax.retrieval.corpus import Document, fingerprint, load_corpus
from parasearch_jax.retrieval.retriever import Encoder, LocalRetriever, NoRetriever, Retriever, checked_k

__all__ = ["Document", "LocalRetriever", "Retriever", "open_retriever"]


def open_retriever(config_or_directory: Mapping | str | os.PathLike, batching: Batching | None = None) -> Retriever:
    """The retriever that a mapping describes (a dict or an ml_collections ConfigDict).

    {"kind": "local", "corpus": "corpus.jsonl", "encoder": "hashed", "topk": 1} encodes the corpus and holds a flat
    index in memory; further keys are the encoder's settings (`hashed.HashedConfig`). "encoder" may also be the path of
    a model directory; its settings are the arguments of `models.load_encoder`. `batching` says how searches share
    calls, and how many answers are kept.
    {"kind": "remote", "url": "http://host:8000", "deadline": 30.0, "retries": 100, "topk": 3} asks a server
    (`retrieval.server`, or one with Search-R1's requests), for which it waits; settings of the local kind may stand
    beside and are not read, so that a configuration changes from one to the other by its kind and url.
    {"kind": "none"} is for agents that never search.
    A directory, or {"kind": "local", "index": directory, ...}, opens what `python -m parasearch_jax.retrieval.build`
    has made (`opening.open_folder`).
    `topk` is recorded in `.info`, callers still pass k. UserError for an unknown kind, encoder or setting, a bad
    corpus or index, or a server that does not come.
    """
    if isinstance(config_or_directory, str | os.PathLike):
        config_or_directory = {"kind": "local", "index": os.fspath(config_or_directory)}
    settings = dict(config_or_directory.items())  # a ConfigDict is no Mapping, but has items
    return _choose("kind", settings, KINDS)(settings, batching)


def named_settings(given: Sequence[str], what: str = "", taken: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a command's --setting flags: ["dim=64", "pooling=cls"] -> {"dim": 64, "pooling": "cls"}.

    UserError for one without a name and a value, given twice, or `taken` by a flag of its own; `what` they are of.
    """
    settings: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or name in settings or name in taken:
            own = "; what has a flag of its own by that" if taken else ""
            raise UserError(f"--setting={item}: give {what}NAME=VALUE, such as dim=64{own}")
        try:
            settings[name] = json.loads(value)
        except ValueError:  # a word
            settings[name] = value
    return settings


def _open_local(settings: dict, batching: Batching | None) -> Retriever:
    from parasearch_jax.retrieval.index import FlatIndex  # imports FAISS, which remote retrievers do without

    if url := settings.pop("url", ""):
        raise UserError(f'retriever.url is {url!r}, but its kind is "local"; set retriever.kind to "remote"')
    for name in ("deadline", "retries"):  # of the remote kind
        settings.pop(name, None)
    if settings.get("index"):
        from parasearch_jax.retrieval.opening import open_folder

        return open_folder(settings, batching)
    settings.pop("index", None)  # '': none
    make_encoder = _choose_encoder(settings)
    path, topk = settings.pop("corpus", None), settings.pop("topk", None)
    if path is None:
        raise UserError('retriever of kind "local" needs a corpus: set retriever.corpus to the path of a jsonl file')
    info = {"corpus_sha256": fingerprint(path)}
    if topk is not None:
        info["topk"] = checked_k(topk)
    documents = load_corpus(path)
    passages = [document.contents for document in documents]
    encoder, encoder_info = make_encoder(passages, settings)
    vectors = encoder.encode(passages, kind="passage")
    index = FlatIndex(vectors.shape[1])
    index.add(vectors)
    return LocalRetriever(documents, encoder, index, info | encoder_info, batching)


def _open_remote(settings: dict, batching: Batching | None) -> Retriever:
    from parasearch_jax.retrieval.remote import RemoteRetriever  # imports httpx, which local ones do without

    if batching is not None:
        raise UserError('retriever of kind "remote": searches are put together by its server, start that one with it')
    own = {name: settings.pop(name) for name in ("url", "deadline", "retries") if name in settings}
    topk = settings.pop("topk", None)
    topk = {} if topk is None else {"topk": checked_k(topk)}
    _check_remote(settings)
    if not own.get("url"):
        raise UserError('retriever of kind "remote" needs a server: set retriever.url, as http://127.0.0.1:8000')
    retriever = RemoteRetriever(**own)
    try:
        retriever.wait_until_ready()
    except BaseException:
        retriever.close_sync()
        raise
    retriever.info = {**retriever.info, **topk}
    return retriever


def _check_remote(settings: dict) -> None:
    """What is left must be settings of the local kind."""
    from parasearch_jax.retrieval.hashed import HashedConfig

    fields = [field.name for field in dataclasses.fields(HashedConfig)]
    if set(settings) <= {"corpus", "encoder", "index", "device", *fields}:
        return
    from parasearch_jax.models import load_encoder  # imports JAX

    _check_settings(settings, ["url", "deadline", "retries", "index", "device", *fields, *_arguments(load_encoder)])


def _hashed(passages: Iterable[str], settings: dict) -> tuple[Encoder, dict]:
    from parasearch_jax.retrieval.hashed import HashedConfig, HashedEncoder

    _check_settings(settings, [field.name for field in dataclasses.fields(HashedConfig)])
    config = HashedConfig(**settings)
    return HashedEncoder(passages, config), {"encoder": "hashed", **dataclasses.asdict(config)}


def _dense(path: str | os.PathLike, passages: Iterable[str], settings: dict) -> tuple[Encoder, dict]:
    from parasearch_jax.models import load_encoder  # imports JAX, which other retrievers do without

    _check_settings(settings, _arguments(load_encoder))
    encoder = load_encoder(path, **settings)
    return encoder, {"encoder": os.fspath(path), **encoder.info}


def _arguments(load_encoder: Callable) -> list[str]:
    return list(inspect.signature(load_encoder).parameters)[1:]  # without its path


def _check_settings(settings: dict, known: list[str]) -> None:
    if unknown := sorted(set(settings) - set(known)):
        names = ", ".join(["kind", "corpus", "encoder", "topk", *known])
        raise UserError(f"unknown retriever setting {', '.join(map(repr, unknown))}; known: {names}")


def _choose_encoder(settings: dict) -> Callable:
    """A name in ENCODERS comes before a directory of that name."""
    path = settings.get("encoder")
    if not isinstance(path, str | os.PathLike) or path in ENCODERS:
        return _choose("encoder", settings, ENCODERS)
    if not Path(path).is_dir():
        names = ", ".join(sorted(ENCODERS))
        raise UserError(
            f"retriever.encoder is {os.fspath(path)!r}; known: {names}, or the path of an encoder's model directory, "
            "of which there is none at that path"
        )
    return functools.partial(_dense, settings.pop("encoder"))


def _choose(key: str, settings: dict, known: Mapping[str, Callable]) -> Callable:
    """What `settings[key]` names; the key is taken out, so that what is left at the end is unknown."""
    name = settings.pop(key, None)
    if name not in known:
        raise UserError(f"retriever.{key} is {name!r}; known: {', '.join(sorted(known))}")
    return known[name]


ENCODERS = {"hashed": _hashed}  # name -> (passages, settings left) -> (encoder, what it adds to info)
KINDS = {
    "local": _open_local,
    "remote": _open_remote,
    "none": lambda *_: NoRetriever(),
}  # name -> (settings left, batching) -> retriever
