"""The byte-level BPE of the small world, trained on text of worlds drawn from seeds of their own.

The pre-tokenizer keeps a year, a tag and `##` whole, so that each becomes one token; everything else splits as words
with their leading space. Any other text still encodes, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
PIECES = r"</?[a-z]+>| ?##| ?\d{4}| ?[A-Za-z]+|\s+| ?[^\sA-Za-z]"


def train_tokenizer(texts: Iterable[str], size: int = 2000) -> PreTrainedTokenizerFast:
    """A BPE of at most `size` tokens, the end token included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
