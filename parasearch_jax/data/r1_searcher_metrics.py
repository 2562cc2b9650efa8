"""Answer metrics as R1-Searcher defines them (arXiv 2503.05592; released `evaluation/metric_calc_rule.py`, and the
same functions in its reward servers), each the best over the golden answers, each in [0, 1].

They differ from `data/metrics.py` in the normaliser, so in the numbers: punctuation is replaced by a blank there and
deleted here ("U.S." -> "u s" against "us"), and F1 takes yes and no for words that match wholly or not at all. No
answer and an empty one are 0 under every metric. The released code knows one golden answer a question.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

from parasearch_jax.data.metrics import golden_list

_BLANKS = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_BOOLS = {"True": "yes", "False": "no"}
_WHOLE = ("yes", "no", "noanswer")


def normalize(text: str) -> str:
    """Lower case, punctuation (ASCII and ‘ ’ ´ `) to blanks, no articles; exactly "True" and "False" are yes and no."""
    return " ".join(_ARTICLES.sub(" ", _BOOLS.get(text, text).lower().translate(_BLANKS)).split())


def em(prediction: str | None, golds: str | Iterable[str]) -> float:
    """1.0 if the normalised prediction equals a normalised golden answer."""
    return _best(lambda predicted, gold: predicted == gold, prediction, golds)


def f1(prediction: str | None, golds: str | Iterable[str]) -> float:
    """F1 of tokens; 0 where either side is yes, no or noanswer and they differ."""
    return _best(_f1, prediction, golds)


def cover_em_bag(prediction: str | None, golds: str | Iterable[str]) -> float:
    """ACC_R: every token of a golden answer is one of the prediction's, in any order."""
    return _best(lambda predicted, gold: set(gold.split()) <= set(predicted.split()), prediction, golds)


def cover_em_contiguous(prediction: str | None, golds: str | Iterable[str]) -> float:
    """The tokens of a golden answer stand in a row in the prediction, or its text within the text."""
    return _best(lambda predicted, gold: gold in predicted, prediction, golds)


def _best(metric: Callable[[str, str], float], prediction: str | None, golds: str | Iterable[str]) -> float:
    predicted = normalize(prediction or "")
    normalized = filter(None, map(normalize, golden_list(golds)))  # one that shrinks to nothing matches nothing
    return max((float(metric(predicted, gold)) for gold in normalized if predicted), default=0.0)


def _f1(predicted: str, gold: str) -> float:
    if predicted != gold and (predicted in _WHOLE or gold in _WHOLE):
        return 0.0
    tokens, golden = predicted.split(), gold.split()
    common = sum((Counter(tokens) & Counter(golden)).values())
    return 2 * common / (len(tokens) + len(golden))
