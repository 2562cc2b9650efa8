"""The small world: people, films, cities and countries with invented names, and the documents that tell their facts.

A world is a function of its seed; the evaluated one has seed 0 (`files.py`).
"""

from __future__ import annotations

import dataclasses
import random

from parasearch_jax.toy import names

SIZES = {"persons": 380, "films": 220, "cities": 80, "countries": 20}  # 700 documents


@dataclasses.dataclass(frozen=True)
class Person:
    name: str
    year: int
    city: str
    profession: str

    def document(self) -> str:
        article = "an" if self.profession[0] in "aeiou" else "a"
        return f"{self.name} is {article} {self.profession}, born in {self.year} in {self.city}."


@dataclasses.dataclass(frozen=True)
class Film:
    name: str
    year: int
    director: str

    def document(self) -> str:
        return f"{self.name} is a film released in {self.year}, directed by {self.director}."


@dataclasses.dataclass(frozen=True)
class City:
    name: str
    country: str

    def document(self) -> str:
        return f"{self.name} is a city in {self.country}."


@dataclasses.dataclass(frozen=True)
class Country:
    name: str
    capital: str

    def document(self) -> str:
        return f"{self.name} is a country with the capital {self.capital}."


@dataclasses.dataclass(frozen=True)
class World:
    """Entities by name, each kind in the order drawn."""

    persons: dict[str, Person]
    films: dict[str, Film]
    cities: dict[str, City]
    countries: dict[str, Country]

    def documents(self) -> dict[str, str]:
        """Title -> text of every entity."""
        groups = (self.persons, self.films, self.cities, self.countries)
        return {name: entity.document() for group in groups for name, entity in group.items()}


def draw_names(rng: random.Random) -> dict[str, list[str]]:
    """Names of every entity of a world; full names and film titles are unique."""
    pool = names.pools()
    full = [f"{a} {b}" for a in pool["first"] for b in pool["last"]]
    titles = [f"{a} {b}" for a in names.ADJECTIVES for b in names.NOUNS]
    return {
        "persons": rng.sample(full, SIZES["persons"]),
        "films": rng.sample(titles, SIZES["films"]),
        "cities": rng.sample(pool["city"], SIZES["cities"]),
        "countries": rng.sample(pool["country"], SIZES["countries"]),
    }


def draw_facts(rng: random.Random, drawn: dict[str, list[str]]) -> World:
    """Facts for the given names. The same names with another `rng` are the same entities with swapped facts."""
    cities = {c: City(c, rng.choice(drawn["countries"])) for c in drawn["cities"]}
    persons = {
        p: Person(p, rng.choice(names.YEARS), rng.choice(drawn["cities"]), rng.choice(names.PROFESSIONS))
        for p in drawn["persons"]
    }
    films = {f: Film(f, rng.choice(names.YEARS), rng.choice(drawn["persons"])) for f in drawn["films"]}
    countries = {c: Country(c, rng.choice(drawn["cities"])) for c in drawn["countries"]}
    return World(persons, films, cities, countries)


def make_world(seed: int | str) -> World:
    """A world as a function of its seed."""
    rng = random.Random(f"world {seed}")
    return draw_facts(rng, draw_names(rng))


def swap_facts(world: World, seed: int | str) -> World:
    """The same entities with facts drawn anew."""
    groups = {k: list(getattr(world, k)) for k in SIZES}
    return draw_facts(random.Random(f"facts {seed}"), groups)


def corpus_rows(world: World) -> list[dict[str, str]]:
    """Rows of the corpus contract: {"id", "contents"}, the quoted title on the first line."""
    return [{"id": str(i), "contents": f'"{t}"\n{text}'} for i, (t, text) in enumerate(world.documents().items())]
