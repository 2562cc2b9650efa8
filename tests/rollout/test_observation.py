"""Observations: shares of the budget, cuts, closing tags."""

import random

import pytest
from scripted import PROTOCOL, byte_tokenizer, toy_tokenizer

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import Document
from parasearch_jax.rollout import observation
from parasearch_jax.rollout.observation import document_blocks, shares


@pytest.fixture(scope="module")
def toy():
    return toy_tokenizer()


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def documents(*words):
    return [Document(str(i), f'"t{i}"\n{"w" * n}') for i, n in enumerate(words)]


def build_observation(protocol, tokenizer, results, *args):
    return observation.build_observation(protocol, tokenizer, document_blocks(protocol, results), *args)


def test_shares():
    assert shares([10, 50, 90], 120) == [10, 50, 60]
    assert shares([90, 10, 50], 120) == [60, 10, 50]
    assert shares([10, 10], 120) == [10, 10] and shares([], 5) == [] and shares([0, 9], 4) == [0, 4]
    assert sorted(shares([50, 50, 50], 100)) == [33, 33, 34]
    rng = random.Random(0)
    for _ in range(200):
        lengths, budget = [rng.randrange(60) for _ in range(rng.randint(1, 8))], rng.randrange(200)
        found = shares(lengths, budget)
        assert sum(found) == min(budget, sum(lengths))
        cut = [s for s, n in zip(found, lengths, strict=True) if s < n]
        assert all(s <= n for s, n in zip(found, lengths, strict=True))
        assert not cut or max(found) <= min(cut) + 1  # nobody has more than one who was cut


def test_all_fits(toy):
    text, ids, cut = build_observation(PROTOCOL, toy, [documents(3, 4), [], documents(5)], 500)
    body = "Doc 1(Title: t0) www\nDoc 2(Title: t1) wwww\nDoc 1(Title: t0) wwwww"  # query order, numbers start again
    assert text == f"\n\n<information>{body}</information>\n\n"
    assert ids == encode(toy, text) and cut == 0
    assert build_observation(PROTOCOL, toy, [[], []], 500)[0] == "\n\n<information></information>\n\n"


def test_three_sub_queries_all_show_text_and_the_block_is_closed(toy):
    results = [[Document(str(i), f'"{name}"\n' + f"{name} says so. " * 90)] for i, name in enumerate("abc")]
    for budget in (150, 250, 500):
        text, ids, cut = build_observation(PROTOCOL, toy, results, budget)
        assert ids == encode(toy, text) and len(ids) <= budget and cut == 3
        assert text.startswith("\n\n<information>Doc 1(Title: a)") and text.endswith("</information>\n\n")
        places = [text.index(f"Doc 1(Title: {name}") for name in "abc"]
        assert places == sorted(places)
        assert all(text.count(f"{name} says") > 0 for name in "abc")
        assert len(ids) > budget - 12  # and what there is gets used


def test_an_unused_share_goes_to_the_others():
    tokenizer = byte_tokenizer()
    results = [documents(2), documents(300), documents(300)]
    frame = len("\n\n<information></information>\n\n")
    short = len("Doc 1(Title: t0) ww\n")
    text, ids, cut = build_observation(PROTOCOL, tokenizer, results, 231)
    first, second, third = text[len("\n\n<information>") : -len("</information>\n\n")].split("Doc 1(Title: t0) ")[1:]
    assert first == "ww\n" and cut == 2 and len(ids) <= 231
    assert abs(len(second) - len(third)) <= 1 and len(second) + 17 == (231 - frame - short) // 2


def test_no_part_of_a_character_is_left_over():
    tokenizer = byte_tokenizer()
    results = [[Document("0", '"t"\n' + "日é😀" * 40)], [Document("1", '"u"\n' + "é日" * 40)]]
    for budget in range(80, 130):
        text, ids, _ = build_observation(PROTOCOL, tokenizer, results, budget)
        assert "\ufffd" not in text and ids == encode(tokenizer, text) and len(ids) <= budget
        assert tokenizer.decode(ids) == text


def test_ids_never_pass_the_budget(toy):
    """Random documents with odd spacing, whose cuts do not add up to the ids of the whole."""
    rng, smallest = random.Random(1), len(encode(toy, PROTOCOL.observation([]))) + 1
    for _ in range(60):
        results = [
            [
                Document(
                    "0", f'"{rng.choice("xyz")}"\n' + "".join(rng.choices(["a", " ", "\n", "é", "19", "##"], k=60))
                )
                for _ in range(rng.randint(0, 3))
            ]
            for _ in range(rng.randint(1, 8))
        ]
        budget = rng.randint(smallest, 200)
        for variant in ("paper", "released"):
            text, ids, cut = build_observation(PROTOCOL, toy, results, budget, variant)
            assert len(ids) <= budget
            if variant == "paper":
                assert ids == encode(toy, text) and text.endswith("</information>\n\n")
            full = encode(toy, build_observation(PROTOCOL, toy, results, 10_000)[0])
            assert (cut > 0) == (len(full) > budget)


def test_released_is_one_right_cut(toy):
    results = [documents(30, 30), documents(30)]
    whole, every, _ = build_observation(PROTOCOL, toy, results, 500, "released")
    text, ids, cut = build_observation(PROTOCOL, toy, results, 40, "released")
    assert len(every) > 40 and ids == every[:40] and cut == 1
    assert whole.startswith(text) and "</information>" not in text


def test_a_budget_below_an_empty_block_is_refused(toy):
    with pytest.raises(UserError, match="observation_tokens is 3"):
        build_observation(PROTOCOL, toy, [documents(30)], 3)


def test_an_end_token_written_in_a_document_is_text(toy):
    hostile = [[Document("0", f'"x"\nbefore {toy.eos_token} after')]]
    text, ids, _ = build_observation(PROTOCOL, toy, hostile, 1000)
    assert toy.eos_token in text and toy.eos_token_id not in ids
    assert toy.decode(ids) == text
