"""Opens a built index: the passages, the encoder and one of the indexes of a folder as a retriever."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.batching import Batching
from parasearch_jax.retrieval.corpus import fingerprint
from parasearch_jax.retrieval.folder import MANIFEST, REBUILD, check_files, damaged, read_manifest
from parasearch_jax.retrieval.passages import Passages
from parasearch_jax.retrieval.retriever import LocalRetriever, checked_k

INDEXES = ("flat", "ivf", "ivfpq", "hnsw", "bm25")
DEVICES = ("cpu", "gpu")


def find_index(path: str | Path) -> Path:
    """The folder of an index: `path` itself, or the only index of the folder of indexes at `path`.

    Raises UserError naming those there are.
    """
    path = Path(path)
    if path.name in INDEXES and (path / MANIFEST).is_file():
        return path
    found = [path / name for name in INDEXES if (path / name / MANIFEST).is_file()]
    if len(found) == 1:
        return found[0]
    there = f"give one of those there: {', '.join(map(str, found))}" if found else "there is none; build it with "
    raise UserError(
        f"retriever.index is {str(path)!r}, which must be the folder of an index: {there}"
        + ("" if found else "python -m parasearch_jax.retrieval.build")
    )


def is_built(path: str | Path) -> bool:
    """Whether `find_index` finds one."""
    try:
        find_index(path)
    except UserError:
        return False
    return True


def open_folder(settings: Mapping[str, Any], batching: Batching | None = None) -> LocalRetriever:
    """The retriever over `settings["index"]`.

    Further keys, all optional: "device" ("gpu": FAISS's, which must be installed), "topk", "batch_tokens" of the
    encoder; "corpus", "encoder" and the encoder's settings, which are compared with those of the index. Checks every
    file against its fingerprint. Raises UserError for whatever does not fit.
    """
    settings = dict(settings)
    folder = find_index(settings.pop("index"))
    device = settings.pop("device", None) or "cpu"
    if device not in DEVICES:
        raise UserError(f"retriever.device is {device!r}; known: {', '.join(DEVICES)}")
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    passages = Passages(folder.parent / "passages")
    with damaged(folder):
        kind, params = manifest["index"], dict(manifest["parameters"])
        about = {"index": kind, "corpus_sha256": passages.manifest["corpus_sha256"], **params}
        if kind != folder.name or manifest["passages"] != about_passages(passages.manifest):
            raise UserError(f"{folder} was built over other passages than lie beside it; {REBUILD}")
    if (path := settings.pop("corpus", None)) and fingerprint(path) != about["corpus_sha256"]:
        raise UserError(
            f"retriever.corpus is {path}, but the index was built from another file; build it anew, or give ''"
        )
    if (topk := settings.pop("topk", None)) is not None:
        about["topk"] = checked_k(topk)
    if kind == "bm25":
        return _open_bm25(folder, passages, settings, device, about, batching)
    from parasearch_jax.retrieval.embeddings import Vectors
    from parasearch_jax.retrieval.encoders import open_encoder
    from parasearch_jax.retrieval.index import GpuIndex
    from parasearch_jax.retrieval.kinds import open_index

    vectors = Vectors(folder.parent / "embeddings")
    encoder, of_encoder = open_encoder(folder.parent / "encoder", settings, passages)
    with damaged(folder):
        if (manifest["encoder"], manifest["vectors_sha256"]) != (of_encoder, vectors.sha256):
            raise UserError(f"{folder} was built from other vectors, or another encoder, than lie beside it; {REBUILD}")
    index = open_index(kind, folder, vectors, params)
    if device == "gpu":
        index = GpuIndex(index)
    about |= {"encoder": of_encoder["name"], "encoder_sha256": of_encoder["sha256"], **of_encoder["settings"]}
    return LocalRetriever(passages, encoder, index, about | {"dim": vectors.dim, "device": device}, batching)


def about_passages(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What an index notes of the passages that it was built over."""
    return {name: manifest[name] for name in ("corpus_sha256", "words", "count", "files")}


def _open_bm25(folder, passages, settings, device, about, batching) -> LocalRetriever:
    from parasearch_jax.retrieval.bm25 import Bm25Index, Words

    if settings.pop("encoder", None) or settings or device != "cpu":
        raise UserError("BM25 has no encoder and runs on CPUs; leave out retriever.encoder, its settings and device")
    index = Bm25Index(folder, len(passages))
    return LocalRetriever(passages, Words(), index, about, batching)
