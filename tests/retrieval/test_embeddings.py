"""Vectors of passages on disk: parts, kills and damage change no bit of them."""

import json

import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import embeddings
from parasearch_jax.retrieval.corpus import Document
from parasearch_jax.retrieval.embeddings import Part, Vectors, encode_part, join

N, D, ROWS = 45, 6, 4
PASSAGES = [Document(str(i), f"title\ntext {i}") for i in range(N)]
WHOLE = Part()
ABOUT = {"encoder": "lengths", "passages": "these"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(embeddings, "ROWS", ROWS)


class Numbers:
    """The vector of a text follows from its number; fails at call `die`."""

    def __init__(self, die=None):
        self.calls, self.texts, self.die = 0, [], die

    def encode(self, texts, kind=None):
        assert kind == "passage"
        self.calls += 1
        if self.calls == self.die:
            raise KeyboardInterrupt
        self.texts += texts
        return np.stack([vector(int(text.split()[-1])) for text in texts])


def vector(number):
    return np.random.default_rng(number).standard_normal(D).astype(np.float32)


WANTED = np.stack([vector(i) for i in range(N)])


def encode(folder, part=WHOLE, encoder=None, **kwargs):
    encoder = encoder or Numbers()
    encode_part(folder, part, PASSAGES, encoder, D, ABOUT, **{"window": ROWS, **kwargs})
    return encoder


def read(folder):
    vectors = Vectors(folder)
    starts, chunks = zip(*vectors.chunks(), strict=True)
    assert list(starts) == list(range(0, N, ROWS))
    return np.concatenate(chunks)


def test_whole(tmp_path):
    encoder = encode(tmp_path, window=10)
    assert encoder.calls == 6  # 12 chunks, two at a time
    join(tmp_path)
    np.testing.assert_array_equal(read(tmp_path), WANTED)
    vectors = Vectors(tmp_path)
    assert (len(vectors), vectors.dim, vectors.manifest["encoder"]) == (N, D, "lengths")
    np.testing.assert_array_equal(vectors.take(N), WANTED)
    some = vectors.take(7)
    assert some.shape == (7, D) and {row.tobytes() for row in some} < {row.tobytes() for row in WANTED}
    np.testing.assert_array_equal(some, vectors.take(7))


@pytest.mark.parametrize("die", [1, 3, 6])
def test_an_interrupted_build_goes_on_where_it_stopped(tmp_path, die):
    encode(tmp_path / "whole", window=8)
    join(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        encode(tmp_path / "killed", encoder=Numbers(die), window=8)
    told = []
    again = encode(tmp_path / "killed", window=8, told=lambda *done: told.append(done))
    assert told[0] == (8 * (die - 1), N) and told[-1] == (N, N)
    assert len(again.texts) == N - 8 * (die - 1)  # nothing twice
    join(tmp_path / "killed")
    np.testing.assert_array_equal(read(tmp_path / "killed"), WANTED)
    assert Vectors(tmp_path / "killed").manifest == Vectors(tmp_path / "whole").manifest


def test_a_line_cut_off_and_a_chunk_that_was_lost_are_encoded_again(tmp_path):
    encode(tmp_path)
    place = tmp_path / "1-of-1"
    notes = (place / "done.jsonl").read_text().splitlines(keepends=True)
    (place / "done.jsonl").write_text("".join(notes[:-1]) + notes[-1][:-5])
    (place / "vectors" / "2.0").unlink()  # the machine lost its power: noted, but not on the disk
    again = encode(tmp_path)
    assert [int(text.split()[-1]) for text in again.texts] == [8, 9, 10, 11, 44]
    join(tmp_path)
    np.testing.assert_array_equal(read(tmp_path), WANTED)


@pytest.mark.parametrize("of", [2, 3, 5, 12, 20])
def test_parts_put_together_are_the_whole(tmp_path, of):
    encode(tmp_path / "whole")
    join(tmp_path / "whole")
    texts = 0
    for number in range(of, 0, -1):  # in any order, each on its own machine
        machine = tmp_path / f"machine{number}"
        texts += len(encode(machine, Part(number, of)).texts)
        (tmp_path / "parts").mkdir(exist_ok=True)
        (machine / f"{number}-of-{of}").rename(tmp_path / "parts" / f"{number}-of-{of}")
    assert texts == N
    join(tmp_path / "parts")
    np.testing.assert_array_equal(read(tmp_path / "parts"), WANTED)
    assert Vectors(tmp_path / "parts").sha256 == Vectors(tmp_path / "whole").sha256


def test_parts_that_lack_or_differ_are_named(tmp_path):
    encode(tmp_path, Part(1, 3))
    encode(tmp_path, Part(3, 3))
    with pytest.raises(UserError, match=r"lacks parts; run the build with --part=2/3"):
        join(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        encode(tmp_path, Part(2, 3), Numbers(die=2))
    with pytest.raises(UserError, match=r"2-of-3 lacks 3 of 4 chunks"):
        join(tmp_path)
    with pytest.raises(UserError, match=r"holds 1-of-3, 2-of-3, 3-of-3: give parts of that number, --merge"):
        encode(tmp_path)
    encode_other = {**ABOUT, "encoder": "another"}
    with pytest.raises(
        UserError, match=r"2-of-3 was begun with other inputs.*\n  encoder: 'lengths' there, 'another' now"
    ):
        encode_part(tmp_path, Part(2, 3), PASSAGES, Numbers(), D, encode_other)
    (tmp_path / "2-of-3" / "part.json").unlink()
    encode_part(tmp_path, Part(2, 3), PASSAGES, Numbers(), D, encode_other)
    with pytest.raises(UserError, match=r"2-of-3 is of other inputs than 1-of-3"):
        join(tmp_path)


def test_no_passage_is_encoded_as_nan(tmp_path):
    class Broken(Numbers):
        def encode(self, texts, kind=None):
            return np.full((len(texts), D), np.nan, np.float32)

    with pytest.raises(UserError, match=r"NaN or infinity for passages of chunks"):
        encode(tmp_path, encoder=Broken())


def test_a_changed_vector_is_seen(tmp_path):
    encode(tmp_path)
    join(tmp_path)
    chunk = tmp_path / "1-of-1" / "vectors" / "3.0"
    damaged = bytearray(chunk.read_bytes())
    damaged[7] ^= 1
    chunk.write_bytes(damaged)
    with pytest.raises(UserError, match=r"chunk 3 is not the one of the manifest"):
        read(tmp_path)
    chunk.unlink()  # zarr gives zeros for it
    with pytest.raises(UserError, match=r"chunk 3 is not the one of the manifest"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("parts", ["../1-of-1"], "outside its folder"),
        ("parts", ["/tmp/1-of-1"], "outside its folder"),
        ("parts", [], "damaged"),
        ("parts", ["1-of-2"], "damaged"),
        ("chunks", ["0" * 64] * 12, "damaged"),
        ("rows", 0, "damaged"),
        ("count", 46, "other vectors"),
        ("count", 0, "damaged"),
        ("dim", 7, "other vectors"),
        ("sha256", None, "damaged"),
    ],
)
def test_a_crafted_manifest_is_refused(tmp_path, field, value, told):
    encode(tmp_path)
    join(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {field: value}))
    with pytest.raises(UserError, match=told):
        Vectors(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    encode(tmp_path / "a")
    join(tmp_path / "a")
    (tmp_path / "a" / "1-of-1" / "vectors").rename(tmp_path / "elsewhere")
    (tmp_path / "a" / "1-of-1" / "vectors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"outside its folder"):
        Vectors(tmp_path / "a")


@pytest.mark.parametrize("text", ["2", "0/2", "3/2", "a/b", "1/0", "-1/2", "1/2/3"])
def test_wrong_parts(text):
    with pytest.raises(UserError, match=r"such as 1/4"):
        Part.parse(text)


def test_every_chunk_is_in_one_part():
    for count in (1, 7, 8, 9, 100):
        for of in (1, 2, 3, 30):
            chunks = [chunk for number in range(1, of + 1) for chunk in Part(number, of).chunks(count, 8)]
            assert chunks == list(range(-(-count // 8)))
