import hashlib
import json

import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.corpus import Document, fingerprint, load_corpus, read_corpus


def write(tmp_path, *lines):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


@pytest.mark.parametrize(
    ("row", "contents", "title", "text"),
    [
        (
            {"id": "a", "contents": '"Mira Voss"\nborn in 1923'},
            '"Mira Voss"\nborn in 1923',
            "Mira Voss",
            "born in 1923",
        ),
        (
            {"id": "a", "contents": "Mira Voss\nline 1\nline 2"},
            "Mira Voss\nline 1\nline 2",
            "Mira Voss",
            "line 1\nline 2",
        ),
        ({"id": 7, "title": "Mira Voss", "text": "a painter"}, '"Mira Voss"\na painter', "Mira Voss", "a painter"),
        ({"id": "a", "title": '"Heroes"', "text": "an album"}, '""Heroes""\nan album', '"Heroes"', "an album"),
        ({"id": "a", "title": 'Weird "Al"', "text": "x"}, '"Weird "Al""\nx', 'Weird "Al"', "x"),
        ({"id": "a", "title": "two\nlines", "text": "x"}, '"two lines"\nx', "two lines", "x"),
        ({"id": "a", "text": "no title"}, '""\nno title', "", "no title"),
        ({"id": "a", "contents": '"\nx'}, '"\nx', '"', "x"),
    ],
)
def test_both_row_forms(tmp_path, row, contents, title, text):
    (document,) = load_corpus(write(tmp_path, row))
    assert (document.id, document.contents) == (str(row["id"]), contents)
    assert (document.title, document.text) == (title, text)


def test_odd_characters_come_through(tmp_path):
    contents = '"北京 O’Neill"\nquote " backslash \\ tab \t line separator \u2028 next \x85 end'
    path = write(tmp_path, json.dumps({"id": "a", "contents": contents}, ensure_ascii=False).encode(), b"  ")
    assert load_corpus(path) == [Document("a", contents)]


def test_byte_order_mark_and_blank_lines_are_skipped(tmp_path):
    good = json.dumps({"id": "a", "contents": "t\nx"}).encode()
    assert [d.id for d in load_corpus(write(tmp_path, b"\xef\xbb\xbf" + good, b"", b"\r"))] == ["a"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"id": "b", "contents"', ["delimiter"]),
        (b'{"id": "b", "contents": "t\n\xff"}', []),
        (b'\xff{"id": "b"}', ["utf-8"]),
        (["b"], ["JSON object", "list"]),
        ({"id": "b", "body": "x"}, ['"contents"', '"text"', "body"]),
        ({"id": "b", "title": "t"}, ['"contents"', '"text"']),
        ({"id": "b", "title": "t", "text": " \n"}, ["no text", "'b'"]),
        ({"id": "b", "contents": "only a title"}, ["no text", "'b'"]),
        ({"id": "b", "contents": ""}, ["no text"]),
        ({"id": "b", "contents": None}, ['"contents"', "None"]),
        ({"id": "b", "title": 3, "text": "x"}, ['"title"', "3"]),
        ({"contents": "t\nx"}, ['"id"']),
        ({"id": "", "contents": "t\nx"}, ['"id"']),
        ({"id": "a", "contents": "t\nx"}, ["'a'", "line 1"]),
    ],
)
def test_wrong_line_is_named(tmp_path, line, words):
    path = write(tmp_path, {"id": "a", "contents": "t\nx"}, b"", line)
    with pytest.raises(UserError) as error:
        load_corpus(path)
    for word in [str(path), "line 3", *words]:
        assert word in str(error.value)


def test_empty_and_absent_file(tmp_path):
    with pytest.raises(UserError, match="no document"):
        load_corpus(write(tmp_path, b""))
    for absent in (tmp_path / "absent.jsonl", tmp_path):
        for read in (load_corpus, fingerprint):
            with pytest.raises(UserError, match="is no file"):
                read(absent)


def test_reading_streams_up_to_the_wrong_line(tmp_path):
    rows = read_corpus(write(tmp_path, {"id": "a", "contents": "t\nx"}, b"broken"))
    assert next(rows).id == "a"
    with pytest.raises(UserError, match="line 2"):
        next(rows)


def test_fingerprint_is_the_sha256_of_the_file(tmp_path):
    path = write(tmp_path, {"id": "a", "contents": "t\nx"})
    assert fingerprint(path) == hashlib.sha256(path.read_bytes()).hexdigest()
