"""The small world as it stands in the repository: files, facts, questions, documents, and how often search misses.

What a question asks for is read off the corpus's text by regular expressions, never from the generator's objects.
"""

import asyncio
import collections
import filecmp
import json
import random
import re

import numpy as np
import parallel_tiny
import pytest

from parasearch_jax.data import load_questions
from parasearch_jax.retrieval import load_corpus, open_retriever
from parasearch_jax.toy import files, questions, recipe, trajectories, world
from parasearch_jax.toy.questions import Lookup
from parasearch_jax.toy.tokenizer import train_tokenizer

NAME = r"([A-Z]\w+(?: [A-Z]\w+)?)"
FACTS = {  # form of a document -> what its groups are
    rf"{NAME} is an? (\w+), born in (\d{{4}}) in {NAME}\.": ("profession", "born", "birthplace"),
    rf"{NAME} is a film released in (\d{{4}}), directed by {NAME}\.": ("released", "director"),
    rf"{NAME} is a city in {NAME}\.": ("country",),
    rf"{NAME} is a country with the capital {NAME}\.": ("capital",),
}


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(files.DIRECTORY / "corpus.jsonl")


@pytest.fixture(scope="module")
def facts(corpus):
    """{title: {fact: value}}; every document matches one form from end to end, and is about its title."""
    found = {}
    for document in corpus:
        (match, names), *more = [
            (m, names) for form, names in FACTS.items() if (m := re.fullmatch(form, document.text))
        ]
        assert not more and match[1] == document.title and document.title not in found
        found[document.title] = dict(zip(names, match.groups()[1:], strict=True))
    return found


def answer(facts, question):
    """The gold answer of a question's text."""

    def ask(form):
        return re.fullmatch(form, question)

    if m := ask(rf"When was {NAME} born\?"):
        return facts[m[1]]["born"]
    if m := ask(rf"Where was {NAME} born\?"):
        return facts[m[1]]["birthplace"]
    if m := ask(rf"What is the profession of {NAME}\?"):
        return facts[m[1]]["profession"]
    if m := ask(rf"When was {NAME} released\?"):
        return facts[m[1]]["released"]
    if m := ask(rf"Who directed {NAME}\?"):
        return facts[m[1]]["director"]
    if m := ask(rf"In which country is {NAME}\?"):
        return facts[m[1]]["country"]
    if m := ask(rf"Who was born first, {NAME} or {NAME}\?"):
        return min(m.groups(), key=lambda name: int(facts[name]["born"]))
    if m := ask(rf"Which film was released first, {NAME} or {NAME}\?"):
        return min(m.groups(), key=lambda name: int(facts[name]["released"]))
    if m := ask(rf"Were {NAME} and {NAME} born in the same city\?"):
        return "yes" if facts[m[1]]["birthplace"] == facts[m[2]]["birthplace"] else "no"
    if m := ask(rf"Where was the director of {NAME} born\?"):
        return facts[facts[m[1]]["director"]]["birthplace"]
    if m := ask(rf"When was the director of {NAME} born\?"):
        return facts[facts[m[1]]["director"]]["born"]
    m = ask(rf"In which country was {NAME} born\?")
    return facts[facts[m[1]]["birthplace"]]["country"]


def rows(name):
    return [json.loads(line) for line in (files.DIRECTORY / f"{name}.jsonl").read_text().splitlines()]


def test_the_files_are_what_the_generator_writes(tmp_path):
    files.write_world(tmp_path)
    names = sorted(path.name for path in files.DIRECTORY.iterdir())
    assert names == ["corpus.jsonl", "test.jsonl", "train.jsonl"]
    assert filecmp.cmpfiles(files.DIRECTORY, tmp_path, names, shallow=False)[0] == names


def test_entities(corpus, facts):
    assert len(corpus) == 700 and len({d.text for d in corpus}) == 700
    assert all(facts[f["director"]].get("born") for f in facts.values() if "director" in f)
    assert all(facts[f["birthplace"]].get("country") for f in facts.values() if "birthplace" in f)
    assert all("capital" in facts[f["country"]] for f in facts.values() if "country" in f)
    years = {int(f[key]) for f in facts.values() for key in ("born", "released") if key in f}
    assert min(years) >= 1900 and max(years) < 2000 and len(years) > 90


def test_gold_answers_are_those_of_the_text(facts):
    for name in ("test", "train"):
        wrong = [r for r in rows(name) if [answer(facts, r["question"])] != r["golden_answers"]]
        assert not wrong, wrong[:3]


def test_years_of_comparisons_differ(facts):
    """Otherwise the question has no answer."""
    for row in rows("test") + rows("train"):
        if row["metadata"]["template"] in ("born_first", "released_first"):
            a, b = ((facts[t].get("born") or facts[t].get("released")) for t in row["metadata"]["support"])
            assert a != b


def test_questions():
    """At least 300 test questions of each kind, the loader knows the kinds, train and test share no question."""
    test, train = (load_questions(files.DIRECTORY / f"{name}.jsonl") for name in ("test", "train"))
    assert all(n >= 300 for n in collections.Counter(q.kind for q in test).values())
    assert set(collections.Counter(q.kind for q in test)) == {"single", "parallel", "sequential"}
    texts = [q.text for q in test + train]
    assert len(set(texts)) == len(texts) and len({q.id for q in test + train}) == len(texts)
    by_template = collections.Counter(r["metadata"]["template"] for r in rows("test"))
    assert len(by_template) == 12 and min(by_template.values()) >= 15
    # a comparison in the other order has another text but is the same question: hardly any
    pairs = [
        {
            (r["metadata"]["template"], frozenset(r["metadata"]["support"]))
            for r in rows(name)
            if r["type"] == "comparison"
        }
        for name in ("test", "train")
    ]
    assert len(pairs[0] & pairs[1]) <= 0.02 * 320


def test_answers_are_not_lopsided():
    """Neither yes, nor the entity named first, is right much more often than the other."""
    for name in ("test", "train"):
        same = [r["golden_answers"][0] == "yes" for r in rows(name) if r["metadata"]["template"] == "same_city"]
        first = [
            r["golden_answers"][0] == r["metadata"]["support"][0]
            for r in rows(name)
            if "_first" in r["metadata"]["template"]
        ]
        assert 0.38 < np.mean(same) < 0.62 and 0.4 < np.mean(first) < 0.6


def test_worlds_are_functions_of_their_seed():
    assert world.make_world(3) == world.make_world(3) != world.make_world(4)
    one = world.make_world(3)
    swapped = world.swap_facts(one, 1)
    assert {g: list(getattr(one, g)) for g in world.SIZES} == {g: list(getattr(swapped, g)) for g in world.SIZES}
    assert np.mean([one.persons[p].year == swapped.persons[p].year for p in one.persons]) < 0.05


@pytest.mark.parametrize("kind", questions.MAKERS)
def test_answer_in_another_world(kind):
    """`answer_in` follows the documents of the other world, read by the same expressions."""
    rng, one = random.Random(0), world.make_world(0)
    other = world.swap_facts(one, 5)
    told = {}
    for title, text in other.documents().items():
        match, names = next((m, names) for form, names in FACTS.items() if (m := re.fullmatch(form, text)))
        told[title] = dict(zip(names, match.groups()[1:], strict=True))
    changed = 0
    for _ in range(100):
        task = questions.draw_task(rng, one, kind)
        found = questions.answer_in(other, task)
        years = [told[x.title].get("born") or told[x.title].get("released") for x in task.lookups]
        if task.template not in ("born_first", "released_first") or years[0] != years[1]:
            assert found == answer(told, task.text)
        changed += found != task.answer
    assert changed > 30


# --------------------------------------------------------------------------------------------------------- tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(recipe.tokenizer_texts(recipe.Recipe(), worlds=12))


def test_documents_have_at_most_25_tokens(tokenizer, corpus):
    lengths = [len(tokenizer(d.text, add_special_tokens=False)["input_ids"]) for d in corpus]
    assert max(lengths) <= 25


def test_years_and_tags_are_single_tokens(tokenizer):
    pieces = [f" {year}" for year in range(1900, 2000)] + [" ##"]
    pieces += [
        "<search>",
        "</search>",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "<information>",
        "</information>",
    ]
    split = [p for p in pieces if len(tokenizer(p, add_special_tokens=False)["input_ids"]) != 1]
    assert not split and len(tokenizer) <= 2000
    ids = tokenizer("born in 1923 in Rumby.\n", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids).count("Ġ1923") == 1


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ["é😀 日本\t\n\n x", "19234 <Search> </x> a##b ##  c", "", "\x00\x7f", " 1923", "1923"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


# ------------------------------------------------------------------------------------------------------------ misses


def test_about_one_query_in_twenty_misses(corpus):
    """Every phrasing of every fact of every entity, top-1, with the settings of the tiny configuration."""
    settings = parallel_tiny.get_config().retriever.to_dict() | {"corpus": str(files.DIRECTORY / "corpus.jsonl")}
    drawn, asked = world.make_world(0), []
    for group, attribute in trajectories.PHRASES:
        for title in getattr(drawn, group):
            asked += [(title, query) for query in trajectories.queries_of(drawn, Lookup(title, attribute))]
    retriever = open_retriever(settings)
    found = retriever.search_sync([query for _, query in asked], 1)
    asyncio.run(retriever.close())
    missed = [documents[0].title != title for (title, _), documents in zip(asked, found, strict=True)]
    assert len(asked) == 3 * (3 * 380 + 2 * 220 + 80) and 0.03 <= np.mean(missed) <= 0.08, np.mean(missed)
    again = [missed[i + 2] for i in range(0, len(missed), 3) if missed[i]]  # the title alone, after the first phrasing
    assert np.mean(again) <= 0.35  # so that another try is worth its cost
