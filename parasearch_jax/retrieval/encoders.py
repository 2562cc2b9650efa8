"""The encoder of a folder of indexes: made from what a command names, copied into the folder, opened from there."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parasearch_jax.digests import sha256_of
from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.corpus import Document
from parasearch_jax.retrieval.folder import check_files, copy_files, damaged, once, read_manifest, write_manifest
from parasearch_jax.retrieval.retriever import Encoder

SUFFIXES = (".json", ".txt", ".safetensors")  # of the files that make an encoder
NOT_OF_VECTORS = ("batch_tokens", "family")  # arguments of load_encoder; the second only finds others


def make_encoder(
    source: Path | None, settings: Mapping[str, Any], passages: Sequence[Document]
) -> tuple[Encoder, dict[str, Any]]:
    """The encoder of a model directory, or the hashed one (None), fitted to the passages; and the settings in full."""
    if source is None:
        from parasearch_jax.retrieval.hashed import HashedConfig, HashedEncoder

        _check(settings, [field.name for field in dataclasses.fields(HashedConfig)])
        config = HashedConfig(**settings)
        settings = dataclasses.asdict(config) | {"char_ngrams": list(config.char_ngrams)}  # as JSON gives it back
        return HashedEncoder((document.contents for document in passages), config), settings
    from parasearch_jax.models import load_encoder  # imports JAX

    _check(settings, list(inspect.signature(load_encoder).parameters)[1:])
    encoder = load_encoder(source, **settings)
    return encoder, {name: value for name, value in encoder.info.items() if name != "dim"}


def _check(settings: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(settings) - set(known)):
        raise UserError(f"unknown setting of the encoder {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def encoder_files(directory: Path) -> list[str]:
    """Relative paths of what makes an encoder, in order; hidden folders are the hub client's own."""
    found = (path.relative_to(directory) for path in directory.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))


def encoder_sha256(directory: Path) -> str:
    """Of the names and contents of `encoder_files`."""
    lines = [f"{sha256_of(directory / name)}  {name}\n" for name in encoder_files(directory)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def keep_encoder(folder: Path, source: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the encoder into `folder`, if it isn't there yet; what tells it from others: name, sha256, settings."""
    about = {"name": "hashed", "sha256": None, "settings": dict(settings)}
    names: list[str] = []
    if source is not None:
        names = encoder_files(source)
        about |= {"name": source.resolve().name, "sha256": encoder_sha256(source)}

    def make() -> None:
        copy_files(source or folder, names, folder)
        write_manifest(folder, about, names)

    once(folder, {name: about[name] for name in ("sha256", "settings")}, make)
    return about


def open_encoder(folder: Path, given: Mapping[str, Any], passages: Sequence[Document]) -> tuple[Encoder, dict]:
    """The encoder that `keep_encoder` has put there, and what tells it from others.

    `given`: "encoder", by its path or "hashed", and its settings, all of which must be those of the folder: UserError
    for one that differs, as queries would be encoded otherwise than the passages were.
    """
    manifest, given = read_manifest(folder), dict(given)
    check_files(folder, manifest)
    with damaged(folder):
        settings, sha256, label = dict(manifest["settings"]), manifest["sha256"], str(manifest["name"])
    if name := given.pop("encoder", None):
        hashed = str(name) == "hashed"
        if not hashed and not Path(name).is_dir():
            raise UserError(f"retriever.encoder is {str(name)!r}, which is no directory; '' takes the one of the index")
        if (None if hashed else encoder_sha256(Path(name))) != sha256:
            raise UserError(
                f"retriever.encoder is {str(name)!r}, but the index was built with {label} (sha256 {sha256}); give "
                "that one, or '' to take it from the index"
            )
    own = {name: given.pop(name) for name in NOT_OF_VECTORS if sha256 and name in given}
    own.pop("family", None)
    for name, value in given.items():
        value = list(value) if isinstance(value, tuple) else value
        if name not in settings:
            known = ", ".join(["device", "topk", *settings])
            raise UserError(f"unknown retriever setting {name!r}; an index has: {known}")
        if settings[name] != value:
            raise UserError(
                f"retriever.{name} is {value!r}, but the index was built with {settings[name]!r}; leave it out, or "
                "build another index"
            )
    encoder, _ = make_encoder(folder if sha256 else None, settings | own, passages)
    return encoder, {"name": label, "sha256": sha256, "settings": settings}
