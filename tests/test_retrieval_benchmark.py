"""benchmarks/retrieval.py encode: what is encoded, and that a worker counts and compares what it says."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import retrieval


def deciles(texts):
    return np.quantile([len(text.split()) for text in texts], np.linspace(0, 1, 11))


def test_real_passages_are_as_long_as_it_says():
    if not retrieval.PASSAGES.is_dir():
        pytest.skip(f"no {retrieval.PASSAGES} here")
    texts = retrieval.passages(10**6)
    assert len(texts) == sum(path.read_bytes().count(b"\n") for path in retrieval.PASSAGES.glob("*.jsonl"))
    np.testing.assert_allclose(deciles(texts)[1:-1], retrieval.WORDS[1:-1], atol=4)  # titles count here
    some = retrieval.passages(100)
    assert len(some) == 100 and set(some) <= set(texts)


def test_texts_made_up_are_as_long_as_real_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(retrieval, "PASSAGES", tmp_path)
    texts = retrieval.passages(4000)
    np.testing.assert_allclose(deciles(texts)[1:-1], retrieval.WORDS[1:-1], rtol=0.1)
    assert texts == retrieval.passages(4000)


def test_a_worker_tells_its_vectors_and_measures_all_texts(monkeypatch):
    told, encoded = [], []
    monkeypatch.setattr(retrieval, "serve", lambda ready, measure: told.extend([ready, measure()]))

    def encode(texts):
        encoded.append(len(texts))
        return np.arange(2 * len(texts)).reshape(-1, 2)

    retrieval.serve_encoder(encode, ["a"] * 100, tokens=300, name="it")
    assert told[0] == {"check": [300, 0, 1, 32, 33, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193], "name": "it"}
    assert encoded == [100, 64, 100] and told[1]["tokens_per_second"] > 0
