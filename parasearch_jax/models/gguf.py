"""Decoders in GGUF files (llama.cpp's format): configuration, weights and tokenizer out of one file.

Source: the `gguf` package for the container and the quantisations, llama.cpp's converter for names and order of rows.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from absl import logging

from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig, Params, RopeScaling, rope_frequencies
from parasearch_jax.models.weights import Index, Tensor, decoder_params

_ARCHITECTURES = ("llama", "qwen2")
_ROPE_FACTORS = "rope_freqs.weight"
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open file: `metadata` by key, `tensors` by GGUF name, mapped and not yet read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, gguf.ReaderTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; "{arch}" in the key stands for the architecture."""
        return self.metadata.get(key.format(arch=self.metadata.get("general.architecture")), default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UserError(f"{self.path} lacks the metadata {key.format(arch=self.get('general.architecture'))}. "
                            "Convert the model again with llama.cpp's converter.")  # fmt: skip
        return value


def open_gguf(path: str | os.PathLike) -> GgufFile:
    """Maps a file and reads its metadata. UserError if it is none, or a part of one."""
    path = Path(path)
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    # What the package raises for other content and for a file that ends too early.
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path} cannot be read as GGUF ({error}). Download it again.") from None
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


# ------------------------------------------------------------------------------------------------------ configuration


def read_config(file: GgufFile, dtype: str = "float32") -> DecoderConfig:
    """The configuration in the metadata. UserError naming what this decoder does not compute."""
    hidden, heads = file.require("{arch}.embedding_length"), file.require("{arch}.attention.head_count")
    head_dim = file.get("{arch}.attention.key_length") or hidden // heads
    _check_supported(file, head_dim)
    cfg = DecoderConfig(
        vocab_size=_shape(file, "token_embd.weight")[0],
        hidden_size=hidden,
        num_layers=file.require("{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=file.get("{arch}.attention.head_count_kv") or heads,
        head_dim=head_dim,
        intermediate_size=file.require("{arch}.feed_forward_length"),
        rope_theta=_decimal(file.get("{arch}.rope.freq_base", 10000.0)),
        rms_norm_eps=_decimal(file.require("{arch}.attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=file.get("general.architecture") == "qwen2",
        max_position_embeddings=file.require("{arch}.context_length"),
        model_type=file.get("general.architecture"),
        eos_token_ids=_end_tokens(file),
        dtype=dtype,
    )
    return dataclasses.replace(cfg, rope_scaling=_rope_scaling(file, cfg))


def _check_supported(file: GgufFile, head_dim: int) -> None:
    found = {
        "general.architecture": _ARCHITECTURES,
        "{arch}.attention.value_length": (None, head_dim),
        "{arch}.rope.dimension_count": (None, head_dim),
        "{arch}.rope.scaling.type": (None, "none"),
        "{arch}.expert_count": (None, 0),
    }
    for key, supported in found.items():
        if (value := file.get(key)) not in supported:
            names = ", ".join(repr(name) for name in supported if name is not None)
            key = key.format(arch=file.get("general.architecture"))
            raise UserError(f"{file.path} has {key} {value!r}; supported: {names}. Take another model.")


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise UserError(f"{file.path} lacks the tensor {name}. Take the file of a whole model.")
    return tuple(file.tensors[name].shape.tolist()[::-1])  # GGUF counts axes from the innermost


def _decimal(value: float) -> float:
    """The shortest number that rounds to the same fp32: 1e-05 was stored as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_tokens(file: GgufFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _rope_scaling(file: GgufFile, cfg: DecoderConfig) -> RopeScaling | None:
    """Llama 3.1's scaling, of which a file holds only what it comes to: the divisor of each frequency, [H/2].

    The slowest one shows the factor (8; 32 in Llama 3.2). The other three numbers were never others than 1, 4 and 8192,
    and must give the divisors of the file.
    """
    if _ROPE_FACTORS not in file.tensors:
        return None
    tensor = file.tensors[_ROPE_FACTORS]
    divisors = gguf.dequantize(tensor.data, tensor.tensor_type)
    scaling = RopeScaling(float(divisors[-1]), 1.0, 4.0, 8192)
    scaled = dataclasses.replace(cfg, rope_scaling=scaling)
    expected = rope_frequencies(cfg) / rope_frequencies(scaled)
    if divisors.shape != expected.shape or not jnp.allclose(divisors, expected, rtol=1e-4):
        raise UserError(
            f"{file.path}: {_ROPE_FACTORS} is not Llama 3's scaling with factor {divisors[-1]:g}, low_freq_factor 1, "
            "high_freq_factor 4 and 8192 old positions. Take the model in Hugging Face layout."
        )
    return scaling


# ------------------------------------------------------------------------------------------------------------ weights


def load_params(file: GgufFile, cfg: DecoderConfig, shardings: Any = None) -> Params:
    """Trainer parameters, dequantised to fp32; `shardings` and errors as in weights.load_params."""
    tensors = {}
    for name, tensor in file.tensors.items():
        if name != _ROPE_FACTORS:
            # llama.cpp rotates neighbouring rows of a Llama's heads, and its converter reorders them for that.
            turned = cfg.model_type == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.weight", name)
            read = _reader(file.path, tensor, cfg.head_dim if turned else None)
            tensors[_hugging_face_name(name)] = Tensor(_shape(file, name), read)
    return decoder_params(tensors, cfg, str(file.path), shardings)


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays, to be reported."""
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found and found[2] in _LAYER:
        return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"
    return _OUTER.get(name, name)


def _reader(path: Path, tensor: gguf.ReaderTensor, head_dim: int | None) -> Callable[[Index], np.ndarray]:
    """Reads parts of a tensor as fp32; with `head_dim` its rows are brought into Hugging Face's order."""

    def read(index: Index) -> np.ndarray:
        if tensor.data.ndim == 1:  # the only axis may be one of bytes
            return dequantize(tensor.data)[index[0]]
        rows = dequantize(tensor.data[index[0]])  # quantised in blocks along a row
        if head_dim is not None:
            rows = split_halves(rows, head_dim)
        return rows[:, index[1]]

    def dequantize(data: np.ndarray) -> np.ndarray:
        try:
            # A copy: of fp32 the package gives a view, and on CPU the parameters would be the mapped file itself.
            return gguf.dequantize(np.array(data), tensor.tensor_type)
        except NotImplementedError:
            raise UserError(f"{path}: tensor {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf "
                            "package cannot read. Take another quantisation.") from None  # fmt: skip

    return read


def split_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of heads from pairs (2i, 2i + 1) to pairs (i, i + H/2): a head's rows 0 1 2 3 -> 0 2 1 3."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# ---------------------------------------------------------------------------------------------------------- tokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

# What splits text before the merges, by tokenizer.ggml.pre: a regular expression as in the models' tokenizer.json, None
# for GPT-2's, which is the one of ByteLevel.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")  # digits in threes
_SINGLE_DIGITS = r"\p{N}"  # in front of GPT-2's
_SPLITS = {
    "gpt-2": (None, True),
    "default": (None, True),
    "smollm": (_SINGLE_DIGITS, True),
    "qwen2": (_QWEN2, False),
    "llama-bpe": (_LLAMA3, False),
    "llama3": (_LLAMA3, False),
    "llama-v3": (_LLAMA3, False),
}


def read_tokenizer(file: GgufFile) -> Any:
    """The file's byte-level BPE as a fast transformers tokenizer, with its special tokens and chat template.

    Control tokens are found in text and are special; user-defined ones are found in text and are text. UserError for
    another kind of tokenizer and for an unknown pre-tokenizer: their ids would be wrong, and look right.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    if (kind := file.require("tokenizer.ggml.model")) != "gpt2":
        raise UserError(f"{file.path} has a tokenizer of kind {kind!r}; supported: 'gpt2' (byte-level BPE). Take the "
                        "model in Hugging Face layout, with its tokenizer.json.")  # fmt: skip
    pre, tokens, types = _pre_name(file), *_vocabulary(file)
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    llama3 = _SPLITS[pre][0] == _LLAMA3
    core = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama3))
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _pre_tokenizer(pre)
    core.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    defined = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    core.post_processor = _post_processor(file, tokens, add_bos=llama3)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        extra_special_tokens=control,
        chat_template=file.get("tokenizer.chat_template"),
        model_max_length=file.require("{arch}.context_length"),
        clean_up_tokenization_spaces=False,
        **{
            f"{name}_token": tokens[i]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if (i := file.get(f"tokenizer.ggml.{key}_token_id")) is not None and i < len(tokens)
        },
    )


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    """Tokens and their types; the unused ones at the end, which only fill up the embedding, are no tokens."""
    tokens = file.require("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    count = len(tokens)
    while count and types[count - 1] == _UNUSED:
        count -= 1
    return tokens[:count], types[:count]


def _pre_name(file: GgufFile) -> str:
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UserError(f"{file.path} has the pre-tokenizer {pre!r}; known: {', '.join(_SPLITS)}. Take the model in "
                        "Hugging Face layout, with its tokenizer.json.")  # fmt: skip
    if pre == "default":
        logging.warning("%s does not say how its tokenizer splits text: taken to be GPT-2's way", file.path)
    return pre


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    pattern, gpt2 = _SPLITS[pre]
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    return pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)])


def _post_processor(file: GgufFile, tokens: list[str], add_bos: bool) -> Any:
    """What stands around a text: the first and last token, where the file asks for them (Llama 3: the first)."""
    from tokenizers import processors

    wanted = {"bos": file.get("tokenizer.ggml.add_bos_token", add_bos), "eos": file.get("tokenizer.ggml.add_eos_token")}
    ids = {name: file.require(f"tokenizer.ggml.{name}_token_id") for name, on in wanted.items() if on}
    before, after = ([tokens[ids[name]]] if name in ids else [] for name in ("bos", "eos"))
    template = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[(tokens[i], i) for i in ids.values()],
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
