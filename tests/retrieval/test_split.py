import random

import pytest

from parasearch_jax.retrieval.split import sentences, split_passages


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("A cat sat. It slept! Why? Because.", ["sat.", "slept!", "Why?", "Because."]),
        ("Dr. Jesse Bennett met J. R. Smith in the U.S. Army. He left.", ["Army.", "left."]),
        ("It cost 3.5 million, e.g. for wood. Done.", ["wood.", "Done."]),
        ('He said "Go." Then he went.', ['"Go."', "went."]),
        ("Version 2. 0 is a number", ["2.", "number"]),
        ("a.m. is early", ["early"]),
        ("Wait... and see. Now.", ["see.", "Now."]),  # a small letter goes on
        ("First paragraph\n\nsecond one", ["paragraph", "one"]),
        ("One line\nis no end. Yes.", ["end.", "Yes."]),
        ("", []),
        (" \n ", []),
    ],
)
def test_where_sentences_end(text, ends):
    assert [sentence[-1] for sentence in sentences(text)] == ends


def test_passages_hold_as_many_whole_sentences_as_fit():
    text = "One two three. Four five. Six seven eight nine. Ten."
    assert split_passages(text, 5) == ["One two three. Four five.", "Six seven eight nine. Ten."]
    assert split_passages(text, 4) == ["One two three.", "Four five.", "Six seven eight nine.", "Ten."]
    assert split_passages(text, 100) == [text]


def test_a_sentence_without_end_is_cut_at_the_limit():
    assert split_passages("a b c d e f g. H i.", 3) == ["a b c", "d e f", "g. H i."]


@pytest.mark.parametrize("words", [1, 7, 100])
def test_no_word_is_lost_and_no_passage_is_too_long(words):
    rng = random.Random(0)
    text = " ".join(rng.choice(["Mr.", "cat", "sat.", "Who?", "é.", "\n\n", "(So.)", "X."]) for _ in range(3000))
    passages = split_passages(text, words)
    assert " ".join(passages).split() == text.split()
    assert max(len(passage.split()) for passage in passages) <= words
