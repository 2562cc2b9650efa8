"""Supervised trajectories: what they say is what the parser, the tokenizer and the documents say."""

import collections
import random

import pytest

from parasearch_jax.protocol import PROTOCOLS, get_protocol
from parasearch_jax.protocol.search_o1 import NO_INFORMATION
from parasearch_jax.rewards.format import valid_by_provenance
from parasearch_jax.rollout import Answer, Episode, Invalid, Search
from parasearch_jax.toy import names, questions, trajectories, world
from parasearch_jax.toy.questions import Lookup, value
from parasearch_jax.toy.recipe import toy_protocol
from parasearch_jax.toy.tokenizer import END
from parasearch_jax.toy.trajectories import Mix, Teller

PROTOCOL = get_protocol("parallel", prompt="Question: {question}\n")
CLEAN = Mix(direct=0, parallel=0, wrong_parallel=0, redundant=0, broken=0, miss=0, miss_again=0)
COUNT = 1200


def tell(kind, mix, count=COUNT, protocol=PROTOCOL):
    """[(task, episode)] over one world."""
    rng, drawn = random.Random(f"tell {kind}"), world.make_world("tell")
    tasks = [questions.draw_task(rng, drawn, kind) for _ in range(count)]
    return [(t, Episode.from_text(Teller(rng, drawn, t, protocol, mix).tell(), protocol, t.text)) for t in tasks]


def shape(episode):
    return "".join({Search: "S", Answer: "A", Invalid: "x"}[type(a)] for a in episode.actions)


def share(flags):
    flags = list(flags)
    return sum(flags) / len(flags)


@pytest.fixture(scope="module")
def told():
    """The usual mix: {kind: [(task, episode)]}."""
    return {kind: tell(kind, Mix()) for kind in questions.MAKERS}


def test_clean_serial_trajectories():
    """One search a lookup, in order, then the right answer, and nothing else."""
    drawn = world.make_world("tell")
    for kind, turns in (("single", "SA"), ("sequential", "SSA"), ("parallel", "SSA")):
        for task, episode in tell(kind, CLEAN, 200):
            assert shape(episode) == turns and episode.answer == task.answer
            for search, lookup in zip(episode.searches, task.lookups, strict=True):
                (query,) = search.queries
                assert query in trajectories.queries_of(drawn, lookup)[:-1]
            assert all(s.text.startswith("<think> ") for s in episode.segments if s.source == "policy")


def test_parallel_and_wrongly_parallel_trajectories():
    mix = Mix(**vars(CLEAN) | {"parallel": 1, "wrong_parallel": 1})
    for kind, turns in (("parallel", "SA"), ("single", "SA"), ("sequential", "SSA")):
        for task, episode in tell(kind, mix, 200):
            assert shape(episode) == turns and episode.answer == task.answer
            first, *rest = episode.searches
            assert len(first.queries) == 2 and all(len(s.queries) == 1 for s in rest)
            titles = [x.title for x in task.lookups] if kind == "parallel" else [task.lookups[0].title] * 2
            assert all(q.startswith(t) for q, t in zip(first.queries, titles, strict=True))
            assert len(set(first.queries)) == 2  # a fact asked in two ways


def test_the_answer_follows_from_the_documents(told):
    """An answer after all lookups were found is right, and every fact said in a thought stands in a document."""
    drawn = world.make_world("tell")
    for pairs in told.values():
        for task, episode in pairs:
            docs = "".join(s.text for s in episode.segments if s.source == "docs")
            found = [trajectories.document(drawn, lookup.title) in docs for lookup in task.lookups]
            if all(found):
                assert episode.answer == task.answer
            thought = "".join(s.text for s in episode.segments if s.source == "policy")
            for lookup in task.lookups:
                if f" {lookup.title}: {questions.value(drawn, lookup)}" in thought:
                    assert trajectories.document(drawn, lookup.title) in docs


def test_misses_are_told_and_tried_again_with_the_title_alone():
    mix = Mix(**vars(CLEAN) | {"miss": 0.5, "miss_again": 0.5, "nothing": 0.3})
    drawn, seen = world.make_world("tell"), collections.Counter()
    for task, episode in tell("single", mix):
        title, documents = task.lookups[0].title, [s.text for s in episode.segments if s.source == "docs"]
        hits = [trajectories.document(drawn, title) in text for text in documents]
        assert hits[:-1] == [False] * (len(hits) - 1) and len(hits) <= 3  # a hit ends the search, three misses too
        for number, search in enumerate(episode.searches):
            assert (search.queries[0] == title) == (number % 2 == 1)
            if not hits[number]:
                after = episode.segments[2 * number + 3].text
                assert f"No {title}." in after
        assert not hits[-1] or episode.answer == task.answer
        seen.update(hits)
        seen["empty"] += any("<information></information>" in text for text in documents)
    assert seen[True] > 300 and seen[False] > 300 and seen["empty"] > 50


def test_trajectories_parse_as_intended(told):
    """Every one ends with an answer; invalid turns get the notice, searches documents, in strict alternation."""
    for pairs in told.values():
        for task, episode in pairs:
            sources = [s.source for s in episode.segments]
            assert sources[0] == "prompt" and sources[1::2] == ["policy"] * len(sources[1::2])
            assert sources[-1] == "policy" and episode.segments[0].text == f"Question: {task.text}\n"
            assert isinstance(episode.actions[-1], Answer) and episode.answer
            for action, segment in zip(episode.actions, episode.segments[2::2], strict=False):
                assert segment.source == ("docs" if isinstance(action, Search) else "notice")
            for action, segment in zip(episode.actions, episode.segments[1::2], strict=True):
                if isinstance(action, Invalid):
                    assert segment.text.endswith((END, "<search></search>"))
                else:
                    assert action.span[2] == len(segment.text)  # nothing is said behind the tag that ends a turn
            assert episode.dropped_queries == 0


def test_shares_of_the_policies(told):
    """Within 3 points of `Mix`, as far as it can be read off a trajectory."""
    mix = Mix()
    for kind, pairs in told.items():
        episodes = [episode for _, episode in pairs]
        assert abs(share("S" not in shape(e) for e in episodes) - mix.direct) < 0.03
        wide = share(len(e.searches[0].queries) == 2 for e in episodes if e.searches)
        assert abs(wide - (mix.parallel if kind == "parallel" else mix.wrong_parallel)) < 0.03
        broken = share(bad_format(e) for e in episodes if e.searches)
        assert 0.08 < broken <= mix.broken + 0.03  # of three turns one breaks, and not every trajectory has three
        again = share(has_redundant_search(e) for e in episodes if e.searches)
        assert abs(again - mix.redundant) < 0.03


def bad_format(episode):
    """Some turn that is not one thought with one block behind it."""
    policy = [s.text for s in episode.segments if s.source == "policy"]
    return any(
        text.count("</think><") != 1 or type(a) is Invalid for text, a in zip(policy, episode.actions, strict=True)
    )


def has_redundant_search(episode):
    return any(" Check " in s.text for s in episode.segments if s.source == "policy")


def test_a_guess_is_of_the_right_sort():
    mix = Mix(**vars(CLEAN) | {"direct": 1})
    drawn = world.make_world("tell")
    pools = {"year": {str(y) for y in names.YEARS}, "city": set(drawn.cities), "profession": set(names.PROFESSIONS)}
    pools |= {"director": set(drawn.persons), "country": set(drawn.countries)}
    for kind in questions.MAKERS:
        pairs = tell(kind, mix, 200)
        for task, episode in pairs:
            assert shape(episode) == "A"
            titles = {lookup.title for lookup in task.lookups}
            pool = {"yes", "no"} if task.template == "same_city" else titles
            assert episode.answer in (pool if kind == "parallel" else pools[task.lookups[-1].attribute])
        right = share(episode.answer == task.answer for task, episode in pairs)
        assert right < 0.1 or (kind == "parallel" and 0.35 < right < 0.65)


def test_protocols_without_separator_never_search_in_parallel():
    for _, episode in tell("parallel", Mix(), 200, get_protocol("search_r1", prompt="{question}\n")):
        assert all("##" not in q for s in episode.searches for q in s.queries)


def test_queries_name_their_entity_and_end_with_the_title_alone():
    drawn = world.make_world(0)
    for group, attribute in trajectories.PHRASES:
        for title in list(getattr(drawn, group))[:20]:
            found = trajectories.queries_of(drawn, Lookup(title, attribute))
            assert found[-1] == title and len(set(found)) == 3 and all(q.startswith(title) for q in found)


def test_drills_are_the_end_of_a_trajectory():
    rng, drawn = random.Random(0), world.make_world("tell")
    for _ in range(200):
        task = questions.draw_task(rng, drawn, "parallel")
        given, told = trajectories.drill(task, drawn, Mix())
        assert given.startswith("<think> ") and all(questions.value(drawn, x) in given for x in task.lookups)
        (action,) = Episode.from_text([("policy", given + told)]).actions
        assert isinstance(action, Answer) and action.text == task.answer
        if task.template == "same_city":
            first, second = (questions.value(drawn, x) for x in task.lookups)
            assert told.startswith(f" {first} {second} {'Same' if first == second else 'Different'}.")
        else:  # the earlier year is said before the answer
            assert told.startswith(f" First {min(questions.value(drawn, x) for x in task.lookups)} {task.answer}.")


# ------------------------------------------------------------------------------------------------------- other agents


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if PROTOCOLS[name].searches and name != "rag"])
def test_every_agent_finds_its_answer_in_its_own_conversation(name):
    """Without mishaps each searches for what it lacks, is well-formed, and answers right."""
    protocol, drawn = toy_protocol(name), world.make_world("tell")
    for kind in questions.MAKERS:
        for task, episode in tell(kind, CLEAN, 60, protocol):
            assert episode.answer == task.answer and valid_by_provenance(episode)
            assert not any(isinstance(action, Invalid) for action in episode.actions)
            shown = "".join(s.text for s in episode.segments if s.source == "docs")
            assert all(lookup.title in shown and value(drawn, lookup) in shown for lookup in task.lookups)


@pytest.mark.parametrize("name", ["no_search", "direct", "cot", "rag"])
def test_agents_that_cannot_search_again_guess(name):
    protocol = toy_protocol(name)
    right = [e.answer == t.answer for t, e in tell("sequential", Mix(), 200, protocol)]
    assert share(right) < 0.3
    assert all(shape(e) == "A" for _, e in tell("single", CLEAN, 50, protocol))


def test_extra_calls_tell_what_the_document_says_or_that_it_does_not():
    rng, drawn, protocol, told = random.Random(0), world.make_world("tell"), toy_protocol("search_o1"), []
    for _ in range(300):
        teller = Teller(rng, drawn, questions.draw_task(rng, drawn, "single"), protocol, Mix())
        teller.tell()
        told += zip(teller.extra[::2], teller.extra[1::2], strict=True)
    for (_, asked), (_, said) in told:
        known = said.removeprefix("Final Information: ").removesuffix(f".{END}").partition(": ")
        assert NO_INFORMATION in said or (f"(Title: {known[0]})" in asked and known[2] in asked)
    assert 0.02 < share(NO_INFORMATION in said for _, (_, said) in told) < 0.2
