"""Articles to passages of at most so many words that end where sentences end."""

from __future__ import annotations

import re

# A sentence ends at one of these with the quotes and brackets that close behind it, where white space follows.
_END = re.compile(r"[.!?…。！？][\"'”’»)\]]*$")
_OPEN = "\"'“‘«(["
# What ends in a full stop and no sentence: single letters (initials, U.S., e.g.) and these.
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+")
_ABBREVIATIONS = frozenset(
    "mr. mrs. ms. dr. prof. st. sr. jr. gen. col. lt. sgt. capt. gov. sen. rep. rev. hon. vs. cf. no. vol. pp. ca. al. "
    "fig. approx. inc. ltd. co. corp. jan. feb. mar. apr. jun. jul. aug. sep. sept. oct. nov. dec.".split()
)


def split_passages(text: str, words: int) -> list[str]:
    """Passages of at most `words` words (what white space parts), each as many whole sentences as fit.

    A sentence that is longer is cut behind `words` words, and what is left of it begins the next passage. No word is
    lost, added or moved: the passages' words are those of the text, in order; white space becomes one blank.

    >>> split_passages("A cat sat. It slept. Then it woke up.", 5)
    ['A cat sat. It slept.', 'Then it woke up.']
    """
    passages: list[str] = []
    passage: list[str] = []
    for sentence in sentences(text):
        if len(passage) + len(sentence) > words and passage:
            passages.append(" ".join(passage))
            passage = []
        while len(sentence) > words:
            passages.append(" ".join(sentence[:words]))
            sentence = sentence[words:]
        passage += sentence
    return passages + ([" ".join(passage)] if passage else [])


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence: one ends in a mark of its end, but not in an abbreviation, nor where the next word
    begins in lower case. A blank line ends one too."""
    found: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", text):
        words, start = paragraph.split(), 0
        for i, word in enumerate(words):
            if i + 1 == len(words) or (_ends(word) and not words[i + 1].lstrip(_OPEN)[:1].islower()):
                found.append(words[start : i + 1])
                start = i + 1
    return found


def _ends(word: str) -> bool:
    bare = word.lstrip(_OPEN)
    return bool(_END.search(word)) and not _INITIALS.fullmatch(bare) and bare.lower() not in _ABBREVIATIONS
