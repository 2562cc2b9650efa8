"""Dense encoders of retrieval (E5, BGE, MiniLM): how each wants its texts, and texts to vectors in few batch shapes.

Axes: n texts, B batch, T tokens, D model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, normalizers

from parasearch_jax.errors import UserError
from parasearch_jax.models.bert import BertConfig, forward, load_params
from parasearch_jax.models.decoder import Params
from parasearch_jax.models.weights import read_json

log = logging.getLogger(__name__)

KINDS = ("query", "passage", None)
MAX_LENGTH = 256  # tokens, of queries and passages alike: Search-R1's server and its script that builds the E5 index
BUCKETS = (*range(16, 256, 16), *range(256, 513, 64))  # tokens a row is padded to: each compiles once for each kind
CHUNK = 1 << 14  # texts that are tokenized at once: bounds the host memory of a large corpus
QUERY_SHARE = 32  # a query batch holds this fraction of `batch_tokens`: a lone query is not padded to hundreds
QUERY_TOKENS = 64  # but so many tokens at least


# ------------------------------------------------------------------------------------------------------ conventions


@dataclasses.dataclass(frozen=True)
class Convention:
    """How an encoder was trained to be used: what pools its tokens, and what stands before a text."""

    pooling: str  # "mean" over the tokens, or "cls", the first one
    query_prefix: str
    passage_prefix: str

    def __post_init__(self):
        if self.pooling not in ("mean", "cls"):
            raise UserError(f"The encoder's pooling is {self.pooling!r}; supported: 'mean', 'cls'.")

    def prefix(self, kind: str | None) -> str:
        return {"query": self.query_prefix, "passage": self.passage_prefix, None: ""}[kind]


# The one place of the prefixes. Their trailing blanks count. Sources: model cards of intfloat/e5-base-v2,
# BAAI/bge-large-en-v1.5 (an instruction for queries only) and sentence-transformers/all-MiniLM-L6-v2.
FAMILIES = {
    "e5": Convention("mean", "query: ", "passage: "),
    "bge": Convention("cls", "Represent this sentence for searching relevant passages: ", ""),
    "minilm": Convention("mean", "", ""),
}
_NAMES = {  # in a model's name, lower case; BGE's Chinese models have another instruction
    "e5": r"(?<![a-z0-9])e5(?![a-z0-9])",
    "bge": r"(?<![a-z0-9])bge[-_.](small|base|large)[-_.]en(?![a-z0-9])",
    "minilm": r"minilm",
}
_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers; we always normalise
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def find_convention(directory: str | os.PathLike, family: str | None = None, **given: str | None) -> Convention:
    """What `directory` and the arguments say, the later in this list the stronger: the model's name (its directory,
    its entry in a hub cache, `_name_or_path` in config.json), its sentence-transformers files, `family` (a key of
    FAMILIES), the fields of Convention. Raises UserError when that leaves a field open."""
    directory = Path(os.path.abspath(directory))
    if family is not None and family not in FAMILIES:
        raise UserError(f"The encoder's family is {family!r}; known: {', '.join(FAMILIES)}.")
    given = {field: value for field, value in given.items() if value is not None}
    _check_blanks(given)
    fields = _of(_named_family(directory)) | _sentence_transformers(directory) | _of(family) | given
    if absent := [field.name for field in dataclasses.fields(Convention) if field.name not in fields]:
        raise UserError(
            f"{directory} does not tell the {', '.join(absent)} of its encoder: neither its name nor its "
            f"sentence-transformers files do. Give family ({', '.join(FAMILIES)}), or {', '.join(absent)} "
            "('' for no prefix); in a configuration as retriever.family and so on."
        )
    return Convention(**fields)


def _of(family: str | None) -> dict[str, str]:
    return dataclasses.asdict(FAMILIES[family]) if family else {}


def _check_blanks(given: Mapping[str, str]) -> None:
    """'query:' for 'query: ' would shift every vector a little, and nobody would notice."""
    for field, value in given.items():
        for known in (getattr(convention, field, "") for convention in FAMILIES.values()):
            if known and value != known and value.strip() == known.strip():
                raise UserError(f"The encoder's {field} is {value!r}; it was trained with {known!r}, blanks included.")


def _named_family(directory: Path) -> str | None:
    """The family that a name gives away; the first name that is clear decides ("bge-small-en-to-e5" isn't)."""
    cached = [part for part in directory.parts if part.startswith("models--")]  # models--org--name/snapshots/<hash>
    for name in (directory.name, *cached, str(read_json(directory / "config.json").get("_name_or_path", ""))):
        found = [family for family, pattern in _NAMES.items() if re.search(pattern, name.lower())]
        if len(found) == 1:
            return found[0]
    return None


def _sentence_transformers(directory: Path) -> dict[str, str]:
    """The fields of Convention that the files of sentence-transformers hold; {} without modules.json."""
    if not (directory / "modules.json").exists():
        return {}
    modules = {str(module["type"]).rpartition(".")[2]: module for module in read_json(directory / "modules.json")}
    if unknown := [name for name in modules if name not in _MODULES]:
        raise UserError(f"{directory / 'modules.json'} has a module {unknown[0]}; supported: {', '.join(_MODULES)}. "
                        "Take another model.")  # fmt: skip
    fields = _prompts(_json_or_empty(directory / "config_sentence_transformers.json").get("prompts") or {})
    if "Pooling" in modules:
        fields["pooling"] = _pooling(directory / modules["Pooling"]["path"] / "config.json")
    return fields


def _prompts(prompts: Mapping[str, str | None]) -> dict[str, str]:
    """Newer versions write {"query": "", "document": ""} for models that never knew of prompts: that says nothing."""
    query = prompts.get("query") or ""
    passage = next((prompts[name] for name in ("passage", "document") if prompts.get(name)), "")
    return {"query_prefix": query, "passage_prefix": passage} if query or passage else {}


def _pooling(path: Path) -> str:
    """Older files have a flag for each mode ("pooling_mode_cls_token": true), newer ones "pooling_mode": "cls"."""
    settings = read_json(path)
    modes = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on]
    asked = ", ".join(modes) or settings.get("pooling_mode")
    pooling, with_prompt = _POOLINGS.get(asked, asked), settings.get("include_prompt", True)
    if pooling not in _POOLINGS.values() or not with_prompt:
        raise UserError(f"{path} asks for pooling {asked!r}, include_prompt {with_prompt}; supported: "
                        f"{' or '.join(_POOLINGS)}, include_prompt True. Take another model.")  # fmt: skip
    return pooling


def _json_or_empty(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


# ---------------------------------------------------------------------------------------------------------- encoder


def pool(hidden: jax.Array, lengths: jax.Array, pooling: str) -> jax.Array:
    """[B,T,D], lengths int32 [B] -> fp32 [B,D], L2-normalised: the first token ("cls") or the mean of all ("mean")."""
    seen = (jnp.arange(hidden.shape[1]) < lengths[:, None])[..., None]
    # The mean's divisor is left out: the norm takes it away again.
    pooled = hidden[:, 0] if pooling == "cls" else jnp.where(seen, hidden, 0).sum(axis=1)
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnames=("cfg", "pooling"))
def _embed(params: Params, cfg: BertConfig, pooling: str, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    return pool(forward(params, cfg, ids, lengths), lengths, pooling)


class Encoder:
    """Texts to vectors; satisfies `retrieval.retriever.Encoder`.

    config, params   BertConfig, parameters as in bert.py
    convention       pooling and prefixes
    max_length       tokens of a text with prefix, [CLS] and [SEP]; longer ones are cut at the right
    cut              how many texts were cut so far

    The vector of a text, to the last bit, depends on the text and its kind alone: a row is padded to a length that the
    text determines, and a batch of that length and kind always has the same number of rows.
    """

    def __init__(self, config: BertConfig, params: Params, tokenizer: Tokenizer, convention: Convention,
                 max_length: int, batch_tokens: int | None = None):  # fmt: skip
        """`batch_tokens`: rows times padded length of a passage batch; None: 1,024 on CPU, where more falls out of the
        cache, 32,768 elsewhere."""
        if not 3 <= max_length <= config.max_positions:  # [CLS], one token, [SEP]
            raise UserError(f"The encoder's max_length is {max_length}; it must be 3 to {config.max_positions}, the "
                            "max_position_embeddings of its config.json.")  # fmt: skip
        self.config, self.params, self.convention, self.max_length = config, params, convention, max_length
        self.batch_tokens = batch_tokens or (1024 if jax.default_backend() == "cpu" else 32768)
        self.cut = 0
        self._rows: jax.sharding.Sharding | None = None  # of the ids [B,T], with `over`
        self._devices = 1
        self._buckets = np.array([*(b for b in BUCKETS if b < self.max_length), self.max_length])
        self._tokenizer = tokenizer
        tokenizer.no_padding()  # MiniLM's tokenizer.json pads to 128 and cuts at 128
        tokenizer.enable_truncation(self.max_length)

    def over(self, devices: Sequence[jax.Device]) -> Encoder:
        """This encoder with the rows of every batch spread over `devices`, each of which gets as many as a lone one
        would: the vectors are the same to the last bit."""
        mesh = jax.sharding.Mesh(np.array(devices), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        spread = copy.copy(self)
        spread._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        spread._devices = len(devices)
        spread.params = jax.device_put(self.params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        return spread

    @property
    def window(self) -> int:
        """Texts that are tokenized and put in order of length at once; the longer, the less padding in all."""
        return CHUNK * self._devices

    @property
    def dim(self) -> int:
        return self.config.hidden_size

    @property
    def info(self) -> dict[str, Any]:
        """What tells two encoders apart that were loaded from the same files, for results.json and index files."""
        convention = dataclasses.asdict(self.convention)
        return {**convention, "max_length": self.max_length, "dtype": self.config.dtype, "dim": self.dim}

    def encode(self, texts: Sequence[str], kind: str | None = None) -> np.ndarray:
        """float32 [n, D], rows of norm 1, in the order of `texts`; `kind` chooses the prefix, None: none.

        Texts of more than `max_length` tokens are cut, counted in `cut` and logged.
        """
        texts = self._prefixed(texts, kind)
        vectors, before = np.empty((len(texts), self.dim), np.float32), self.cut
        for start in range(0, len(texts), self.window):
            stop = start + self.window
            self._encode_chunk(texts[start:stop], kind, vectors[start:stop])
        if cut := self.cut - before:
            log.warning("%d of %d texts (kind %s) have more than %d tokens; their ends were cut", cut, len(texts), kind,
                        self.max_length)  # fmt: skip
        return vectors

    def filled(self, texts: Sequence[str], kind: str | None = None) -> float:
        """The share of the rows computed for `texts`, by their tokens, that hold one: near 1 for many texts."""
        lengths = [len(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(self._prefixed(texts, kind))]
        batches = list(self._batches(np.array(lengths), kind))
        return sum(len(members) * T for members, (_, T) in batches) / sum(B * T for _, (B, T) in batches)

    def _prefixed(self, texts: Sequence[str], kind: str | None) -> list[str]:
        if isinstance(texts, str):
            raise TypeError(f"encode takes a list of texts, this is the string {texts[:40]!r}; wrap it in a list")
        if kind not in KINDS:
            raise ValueError(f"encode: kind {kind!r} is none of {', '.join(map(repr, KINDS))}")
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"encode: text {number} must be a string, it is {type(text).__name__} {text!r}")
        prefix = self.convention.prefix(kind)
        # JSON can carry a lone surrogate, which no tokenizer takes; a query must never raise for its characters.
        return [prefix + text.encode("utf-8", "replace").decode("utf-8") for text in texts]

    def _encode_chunk(self, texts: list[str], kind: str | None, out: np.ndarray) -> None:
        """Fills `out` [n, D]. All batches are started before the first is waited for."""
        encodings = self._tokenizer.encode_batch_fast(texts)
        self.cut += sum(bool(encoding.overflowing) for encoding in encodings)
        rows = [encoding.ids for encoding in encodings]
        started = []
        for members, shape in self._batches(np.array([len(row) for row in rows]), kind):
            batch = _padded([rows[i] for i in members], shape)
            ids, lengths = batch if self._rows is None else jax.device_put(batch, self._rows)
            started.append((members, _embed(self.params, self.config, self.convention.pooling, ids, lengths)))
        for members, vectors in started:
            out[members] = np.asarray(vectors)[: len(members)]

    def _batches(self, lengths: np.ndarray, kind: str | None) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
        """(positions of texts, (B, T)): texts of one bucket together, in batches whose shape depends on the bucket
        and the kind alone."""
        tokens = max(QUERY_TOKENS, self.batch_tokens // QUERY_SHARE) if kind == "query" else self.batch_tokens
        chosen = np.searchsorted(self._buckets, lengths)
        for bucket in np.unique(chosen):
            members, T = np.flatnonzero(chosen == bucket), int(self._buckets[bucket])
            B = max(1, tokens // T) * self._devices
            yield from ((members[i : i + B], (B, T)) for i in range(0, len(members), B))


def _padded(rows: list[list[int]], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 [B,T], lengths int32 [B]; rows that no text fills have length 0."""
    ids, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], lengths[i] = row, len(row)
    return ids, lengths


# ---------------------------------------------------------------------------------------------------------- loading


def load_encoder(path: str | os.PathLike, dtype: str = "float32", *, family: str | None = None,
                 pooling: str | None = None, query_prefix: str | None = None, passage_prefix: str | None = None,
                 max_length: int | None = None, batch_tokens: int | None = None) -> Encoder:  # fmt: skip
    """Loads a BERT encoder from a directory in Hugging Face layout (config.json, model.safetensors, tokenizer.json).

    `dtype` is the compute dtype, "float32" or "bfloat16". Pooling and prefixes are found in the directory (see
    `find_convention`) unless given; `max_length` and `batch_tokens` are those of Encoder, the former by default 256, or
    less where the model's files allow fewer tokens. Raises UserError naming the path, what is wrong, and the fix.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"The encoder {directory} is no directory. Give one with config.json, model.safetensors and "
                        "tokenizer.json.")  # fmt: skip
    config = BertConfig.from_hf(read_json(directory / "config.json"), dtype)
    given = {"pooling": pooling, "query_prefix": query_prefix, "passage_prefix": passage_prefix}
    convention = find_convention(directory, family, **given)
    if max_length is None:
        trained = _json_or_empty(directory / "sentence_bert_config.json").get("max_seq_length") or MAX_LENGTH
        max_length = min(MAX_LENGTH, trained, config.max_positions)
    tokenizer = _load_tokenizer(directory, config)
    return Encoder(config, load_params(directory, config), tokenizer, convention, max_length, batch_tokens)


def _load_tokenizer(directory: Path, cfg: BertConfig) -> Tokenizer:
    """The tokenizer of a model directory. Raises UserError for one that doesn't fit the model."""
    from parasearch_jax.models import load_tokenizer

    tokenizer = load_tokenizer(directory).backend_tokenizer
    if tokenizer.get_vocab_size() > cfg.vocab_size:  # an array lookup would clamp the ids silently
        raise UserError(f"The tokenizer in {directory} has {tokenizer.get_vocab_size()} tokens, the encoder "
                        f"{cfg.vocab_size}. Take the one that belongs to the model.")  # fmt: skip
    if tokenizer.num_special_tokens_to_add(False) != 2:
        raise UserError(f"The tokenizer in {directory} does not put [CLS] and [SEP] around a text. Take the "
                        "tokenizer.json that belongs to the model.")  # fmt: skip
    # PreTrainedTokenizerFast takes tokenizer.json alone; where the two differ, BERT's own class obeys this file.
    lower, normalizer = _json_or_empty(directory / "tokenizer_config.json").get("do_lower_case"), tokenizer.normalizer
    if lower is not None and getattr(normalizer, "lowercase", lower) != lower:
        normalizer.lowercase = lower  # the tokenizer's own, no copy
    if _json_or_empty(directory / "sentence_bert_config.json").get("do_lower_case"):  # besides the tokenizer's own
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [normalizer])])
    return tokenizer
