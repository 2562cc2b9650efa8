"""Answer metrics: exact match, token F1 and containment, each the best over the golden answers, each in [0, 1].

Every metric takes the prediction (None: no answer was given) and the golden answers as a string, a list or a numpy
array; a string is one answer, never a list of letters. No answer and an empty answer are 0 under every metric.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single blanks; never empty unless the text is blank.

    Differs from the released normaliser (`normalize_released`) only where that one returns "": of articles alone the
    last is kept, of punctuation alone all, so that the gold "A" neither matches an empty answer nor hides in "zebra".
        "The Beatles!" -> "beatles"     "A" -> "a"     "The A." -> "a"     "?!" -> "?!"
    As there, punctuation is deleted, not replaced ("1914-1918" -> "19141918"), and only ASCII counts: an en dash stays.
    """
    text = " ".join(text.lower().split())
    bare = " ".join(text.translate(_PUNCTUATION).split()) or text
    return " ".join(_ARTICLES.sub(" ", bare).split()) or bare.rpartition(" ")[2]


def normalize_released(text: str) -> str:
    """SQuAD's normaliser as Search-R1 and ParallelSearch ship it (`qa_em_format.py`); "A" and "" both give ""."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def golden_list(golds: Any) -> list[str]:
    """The golden answers as a list of strings, whatever they came in (string, list, tuple, numpy array)."""
    if hasattr(golds, "tolist"):  # numpy, also zero-dimensional
        golds = golds.tolist()
    return [golds] if isinstance(golds, str) else [str(gold) for gold in golds]


def em(prediction: str | None, golds: str | Iterable[str]) -> float:
    """1.0 if the normalised prediction equals a normalised golden answer."""
    predicted = normalize(prediction or "")
    return float(bool(predicted) and any(predicted == normalize(gold) for gold in golden_list(golds)))


def em_released(prediction: str | None, golds: str | Iterable[str]) -> float:
    """`em` with the released normaliser: an empty answer matches the golden answers "A" and "the"."""
    if prediction is None:
        return 0.0
    predicted = normalize_released(prediction)
    return float(any(predicted == normalize_released(gold) for gold in golden_list(golds)))


def f1(prediction: str | None, golds: str | Iterable[str]) -> float:
    """The best F1 of normalised tokens, counted with multiplicity (SQuAD; no special case for yes and no)."""
    predicted = normalize(prediction or "").split()
    return max((_token_f1(predicted, normalize(gold).split()) for gold in golden_list(golds)), default=0.0)


def f1_released(prediction: str | None, golds: str | Iterable[str]) -> float:
    """`f1` with the released normaliser: the golden answers "A" and "the" have no token, so nothing matches them."""
    predicted = normalize_released(prediction or "").split()
    return max((_token_f1(predicted, normalize_released(gold).split()) for gold in golden_list(golds)), default=0.0)


def _token_f1(predicted: list[str], gold: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * common / (len(predicted) + len(gold)) if common else 0.0


def cover_em(prediction: str | None, golds: str | Iterable[str]) -> float:
    """1.0 if a normalised golden answer stands in the normalised prediction, whole tokens in a row.

    Stricter than the substring tests in use: "zebra" does not cover "A", nor "1941" the gold "194".
    """
    predicted = f" {normalize(prediction or '')} "
    normalized = (normalize(gold) for gold in golden_list(golds))
    return float(any(gold and f" {gold} " in predicted for gold in normalized))


def cover_em_bag(prediction: str | None, golds: str | Iterable[str]) -> float:
    """1.0 if every token of a normalised golden answer is one of the prediction's, in any order."""
    predicted = set(normalize(prediction or "").split())
    normalized = (set(normalize(gold).split()) for gold in golden_list(golds))
    return float(any(gold and gold <= predicted for gold in normalized))
