"""Questions about a small world: single, parallel (comparison) and sequential (compositional), with gold answers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from parasearch_jax.toy.world import World

TEST_PER_KIND, TRAIN_PER_KIND = 320, 500
TYPES = {"single": "na", "parallel": "comparison", "sequential": "compositional"}  # kind -> type, as in the papers


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One fact to look up: the entity's title and the attribute a query names."""

    title: str
    attribute: str


@dataclasses.dataclass(frozen=True)
class Task:
    """A question with the lookups that answer it.

    `lookups` of a sequential task are in order, each after the one before it; those of a parallel task are independent.
    `template` names the form of the question.
    """

    kind: str
    template: str
    text: str
    answer: str
    lookups: tuple[Lookup, ...]


def value(world: World, lookup: Lookup) -> str:
    """The fact a lookup finds."""
    for group in (world.persons, world.films, world.cities):
        if lookup.title in group:
            return str(getattr(group[lookup.title], lookup.attribute))
    raise KeyError(lookup.title)


def _single(rng: random.Random, world: World) -> Task:
    forms = {
        "born": (world.persons, "When was {} born?", "year"),
        "birthplace": (world.persons, "Where was {} born?", "city"),
        "profession": (world.persons, "What is the profession of {}?", "profession"),
        "released": (world.films, "When was {} released?", "year"),
        "director": (world.films, "Who directed {}?", "director"),
        "country": (world.cities, "In which country is {}?", "country"),
    }
    template = rng.choices(list(forms), weights=[3, 3, 3, 2, 2, 1])[0]
    group, text, attribute = forms[template]
    lookup = Lookup(rng.choice(list(group)), attribute)
    return Task("single", template, text.format(lookup.title), value(world, lookup), (lookup,))


def draw_parallel(rng: random.Random, world: World) -> Task:
    """Two independent lookups and their comparison."""
    template = rng.choice(["born_first", "released_first", "same_city"])
    group, attribute = (world.films, "year") if template == "released_first" else (world.persons, "year")
    if template == "same_city":
        return draw_same_city(rng, world)
    a, b = rng.sample(list(group), 2)
    while group[a].year == group[b].year:
        a, b = rng.sample(list(group), 2)
    form = "Who was born first, {} or {}?" if template == "born_first" else "Which film was released first, {} or {}?"
    answer = a if group[a].year < group[b].year else b
    return Task("parallel", template, form.format(a, b), answer, (Lookup(a, attribute), Lookup(b, attribute)))


def draw_same_city(rng: random.Random, world: World) -> Task:
    """Were P and Q born in the same city? Yes and no are equally frequent."""
    a = rng.choice(list(world.persons))
    city = world.persons[a].city
    alike = [p for p, x in world.persons.items() if x.city == city and p != a]
    other = [p for p, x in world.persons.items() if x.city != city]
    yes = bool(alike) and rng.random() < 0.5
    b = rng.choice(alike if yes else other)
    lookups = (Lookup(a, "city"), Lookup(b, "city"))
    return Task("parallel", "same_city", f"Were {a} and {b} born in the same city?", "yes" if yes else "no", lookups)


def _sequential(rng: random.Random, world: World) -> Task:
    template = rng.choice(["director_birthplace", "director_born", "person_country"])
    if template == "person_country":
        person = rng.choice(list(world.persons))
        lookups = (Lookup(person, "city"), Lookup(world.persons[person].city, "country"))
        text = f"In which country was {person} born?"
    else:
        film = rng.choice(list(world.films))
        attribute, word = ("city", "Where") if template == "director_birthplace" else ("year", "When")
        lookups = (Lookup(film, "director"), Lookup(world.films[film].director, attribute))
        text = f"{word} was the director of {film} born?"
    return Task("sequential", template, text, value(world, lookups[-1]), lookups)


MAKERS: dict[str, Callable[[random.Random, World], Task]] = {
    "single": _single,
    "parallel": draw_parallel,
    "sequential": _sequential,
}


def draw_task(rng: random.Random, world: World, kind: str) -> Task:
    """One random question of a kind."""
    return MAKERS[kind](rng, world)


def answer_in(world: World, task: Task) -> str:
    """The answer of the same question in another world with the same entities."""
    if task.kind == "parallel":
        found = [value(world, lookup) for lookup in task.lookups]
        if task.template == "same_city":
            return "yes" if found[0] == found[1] else "no"
        return task.lookups[found[1] < found[0]].title
    if task.kind == "single":
        return value(world, task.lookups[0])
    return value(world, Lookup(value(world, task.lookups[0]), task.lookups[1].attribute))


def split_tasks(world: World, seed: int | str) -> dict[str, list[Task]]:
    """Tasks of train and test, disjoint (a comparison the other way round is the same question); the test set holds
    `TEST_PER_KIND` of each kind."""
    rng = random.Random(f"questions {seed}")
    split: dict[str, list[Task]] = {"test": [], "train": []}
    for kind in MAKERS:
        tasks: dict[tuple, Task] = {}
        while len(tasks) < TEST_PER_KIND + TRAIN_PER_KIND:
            task = draw_task(rng, world, kind)
            tasks.setdefault((task.template, frozenset(task.lookups)), task)
        split["test"] += list(tasks.values())[:TEST_PER_KIND]
        split["train"] += list(tasks.values())[TEST_PER_KIND:]
    return split


def question_rows(name: str, tasks: list[Task]) -> list[dict]:
    """Rows of a questions file."""
    return [
        {
            "id": f"{name}-{i}",
            "question": task.text,
            "golden_answers": [task.answer],
            "type": TYPES[task.kind],
            "metadata": {"template": task.template, "support": [lookup.title for lookup in task.lookups]},
        }
        for i, task in enumerate(tasks)
    ]
