import hashlib
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import hashed
from parasearch_jax.retrieval.hashed import HashedConfig, HashedEncoder
from parasearch_jax.retrieval.index import FlatIndex
from parasearch_jax.toy import world

CORPUS = [
    '"Mira Voss"\nMira Voss is a painter, born in 1923 in Taldor.',
    '"Mira Kell"\nMira Kell is a singer, born in 1931 in Taldor.',
    '"Oren Voss"\nOren Voss is an actor, born in 1919 in Brunn.',
    "",
]
QUERIES = ["Mira Voss birth year", "kell", "", "?!", "zyzzyq", 'O’Neill "Voss"\nTaldor\\', "北京 Voss", "\ud800 Brunn"]


def reference(text, corpus, config):
    """The vector of a text, feature by feature, in plain Python."""

    def features(text):
        words = re.findall(r"\w+", text.lower())
        out = [(w, config.word_weight) for w in words]
        out += [(f"{words[i]} {words[i + 1]}", config.pair_weight) for i in range(len(words) - 1)]
        for word in words:
            for n in config.char_ngrams:
                out += [("#" + f"<{word}>"[i : i + n], config.char_weight) for i in range(len(word) + 3 - n)]
        return out

    df = {}
    for other in corpus:
        for feature in {f for f, _ in features(other)}:
            df[feature] = df.get(feature, 0) + 1
    vector = np.zeros(config.dim)
    for feature, weight in features(text):
        if feature in df:
            h = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")
            idf = math.log((len(corpus) + 1) / (df[feature] + 0.5))
            vector[(h >> 1) % config.dim] += (1 if h & 1 else -1) * weight * idf
    norm = np.linalg.norm(vector)
    return vector / norm if norm else vector


@pytest.mark.parametrize("config", [HashedConfig(dim=32), HashedConfig(dim=101, char_ngrams=(2, 4), pair_weight=0.0)])
def test_encode_equals_the_plain_sum_over_features(config):
    encoder, texts = HashedEncoder(CORPUS, config), CORPUS + QUERIES[:-1]
    got = encoder.encode(texts)
    assert got.dtype == np.float32 and got.shape == (len(texts), config.dim) and got.flags.c_contiguous
    np.testing.assert_allclose(got, [reference(t, CORPUS, config) for t in texts], atol=1e-6)


def test_norm_is_one_and_empty_texts_are_zero():
    encoder = HashedEncoder(CORPUS)
    norms = np.linalg.norm(encoder.encode(QUERIES), axis=1)
    empty = [not re.search("voss|kell|brunn", q.lower()) for q in QUERIES]
    np.testing.assert_allclose(norms, [0.0 if e else 1.0 for e in empty], atol=1e-6)
    assert encoder.encode([]).shape == (0, encoder.dim) and encoder.encode([]).dtype == np.float32


def test_a_vector_depends_on_its_text_only(monkeypatch):
    encoder = HashedEncoder(CORPUS)
    whole = encoder.encode(QUERIES * 5, kind="query")
    alone = np.concatenate([HashedEncoder(CORPUS).encode([q], kind="passage") for q in QUERIES] * 5)
    np.testing.assert_array_equal(whole, alone)
    monkeypatch.setattr(hashed, "CHUNK_FLOATS", 3 * encoder.dim)  # chunks of three texts
    monkeypatch.setattr(hashed, "CACHE_ENTRIES", 2)
    np.testing.assert_array_equal(HashedEncoder(CORPUS).encode(QUERIES * 5), whole)


def test_same_bytes_in_another_process():
    code = (
        "import sys, hashlib; from parasearch_jax.retrieval.hashed import HashedEncoder;"
        "from test_retrieval_hashed import CORPUS, QUERIES;"
        "print(hashlib.sha256(HashedEncoder(CORPUS).encode(CORPUS + QUERIES).tobytes()).hexdigest())"
    )
    here = os.path.dirname(os.path.abspath(__file__))
    want = hashlib.sha256(HashedEncoder(CORPUS).encode(CORPUS + QUERIES).tobytes()).hexdigest()
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == want


def small_world_hits(dim, seed=0):
    """Share of plausible queries whose own document comes first."""
    small = world.make_world(seed)
    titles, contents = list(small.documents()), [row["contents"] for row in world.corpus_rows(small)]
    encoder = HashedEncoder(contents, HashedConfig(dim=dim))
    index = FlatIndex(dim)
    index.add(encoder.encode(contents, kind="passage"))
    asked = [(p, f"{p} {what}") for p in small.persons for what in ("birth year", "birthplace", "profession")]
    asked += [(f, f"{f} {what}") for f in small.films for what in ("release year", "director")]
    asked += [(c, f"{c} country") for c in small.cities]
    hits = index.search(encoder.encode([query for _, query in asked], kind="query"), 1)
    return np.mean([titles[row[0][0]] == title for row, (title, _) in zip(hits, asked, strict=True)])


def test_dim_is_the_knob_of_the_miss_rate():
    shares = [small_world_hits(dim) for dim in (16, 40, 512)]
    assert shares[0] < 0.8 < 0.9 < shares[1] < shares[2]
    assert shares[2] > 0.995


def test_curly_and_straight_forms_meet():
    encoder = HashedEncoder(["O'Neill wrote", "Ｖｏｓｓ painted"])
    a, b, c, d = encoder.encode(["o’neill", "O'NEILL", "Voss", "ｖｏｓｓ"])
    assert a @ b == pytest.approx(1) and c @ d == pytest.approx(1)


def test_misspelt_name_still_finds_its_document():
    encoder = HashedEncoder(CORPUS)
    assert np.argmax(encoder.encode(CORPUS) @ encoder.encode(["Orenn Vos birth year"])[0]) == 2


@pytest.mark.parametrize(
    "settings", [{"dim": 0}, {"dim": 1.5}, {"char_ngrams": [0]}, {"word_weight": -1}, {"char_weight": float("nan")}]
)
def test_wrong_settings_are_named(settings):
    ((name, value),) = settings.items()
    with pytest.raises(UserError, match=name) as error:
        HashedConfig(**settings)
    assert str(value).strip("[]") in str(error.value)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"list of texts.*'Mira'"):
        HashedEncoder(CORPUS).encode("Mira")
    with pytest.raises(ValueError, match="'question'"):
        HashedEncoder(CORPUS).encode(["Mira"], kind="question")
