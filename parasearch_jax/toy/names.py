"""Pools of invented names, each a fixed function of its size: the words of every small world are drawn from here.

Worlds share these words and differ in how they combine them, as real questions share a vocabulary and differ in facts.
"""

import functools
import random

ONSETS = "b br c d dr f fl g gr h j k kl l m n p pr r s st t tr v vr w z".split()
VOWELS = "a e i o u ai ea io".split()
CODAS = "l ld m n nd r rn rt s sk th x".split()

ADJECTIVES = (
    "Amber Bitter Broken Burning Crimson Distant Empty Fading Frozen Gentle Golden Hidden Hollow Iron Ivory "
    "Lonely Lost Marble Midnight Narrow Northern Painted Paper Quiet Rising Sacred Salted Scarlet Second Silent "
    "Silver Sleeping Southern Stolen Velvet Wandering Western Winter Wooden Yellow"
).split()
NOUNS = (
    "Anchor Arrow Bridge Candle Canyon Carousel Castle Circus Clock Compass Crossing Crown Curtain Desert Echo "
    "Empire Falcon Ferry Fountain Garden Harbor Horizon Island Journey Lantern Letter Lighthouse Meadow Mirror "
    "Mountain Oath Orchard Orchid Palace Passage Piano Promise Prophet Riddle River Sailor Shadow Signal Station "
    "Stranger Summer Tower Valley Voyage Window"
).split()
PROFESSIONS = (
    "actor architect astronomer banker botanist carpenter chemist composer dancer dentist engineer farmer "
    "geologist historian jeweller journalist lawyer painter pilot poet sculptor singer surgeon tailor"
).split()
YEARS = tuple(range(1900, 2000))


def _words(rng: random.Random, count: int, ending: tuple[str, ...], taken: set[str]) -> tuple[str, ...]:
    """`count` pronounceable words that are not in `taken`; adds them to it."""
    words: list[str] = []
    while len(words) < count:
        stem = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ONSETS + CODAS)
        word = (stem + rng.choice(ending)).capitalize()
        if word not in taken:
            taken.add(word)
            words.append(word)
    return tuple(words)


@functools.cache
def pools() -> dict[str, tuple[str, ...]]:
    """first (60), last (240), city (120) and country (40) names; no word in two pools."""
    rng, taken = random.Random("names"), set(ADJECTIVES + NOUNS)
    return {
        "first": _words(rng, 60, ("a", "o", "en", "is"), taken),
        "last": _words(rng, 240, ("er", "ov", "ard", "um", "ek", "ins"), taken),
        "city": _words(rng, 120, ("burg", "ton", "by", "port"), taken),
        "country": _words(rng, 40, ("land", "ia", "stan"), taken),
    }
