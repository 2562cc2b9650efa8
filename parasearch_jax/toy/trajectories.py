"""Supervised trajectories of the small world: how a clumsy agent would answer, turn by turn, with the right facts.

The base checkpoint is trained on these. Each trajectory follows one policy (direct answer, serial, parallel, wrongly
parallel), and may carry a redundant search or a broken turn; retrieval is simulated, misses included.
"""

from __future__ import annotations

import dataclasses
import random

from parasearch_jax.protocol import DOCUMENTS, Protocol, Turn
from parasearch_jax.protocol.search_o1 import MARKER, NO_INFORMATION
from parasearch_jax.toy import names
from parasearch_jax.toy.questions import Lookup, Task, value
from parasearch_jax.toy.tokenizer import END
from parasearch_jax.toy.world import World

# How often the document that a question itself finds is none of those it asks about, as the retriever of
# configs/parallel_tiny.py does on the test questions.
QUESTION_MISSES = {"single": 0.07, "sequential": 0.07, "parallel": 0.28}

Segments = list[tuple[str, str]]  # (source, text), as Episode.from_text takes

PHRASES = {  # what stands behind the title in a query; the title alone is the fallback after a miss
    ("persons", "year"): ("birth year", "born"),
    ("persons", "city"): ("birthplace", "born in"),
    ("persons", "profession"): ("profession", "is a"),
    ("films", "year"): ("release year", "released"),
    ("films", "director"): ("director", "directed by"),
    ("cities", "country"): ("country", "city in"),
}


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of each policy among the trajectories; the rest searches serially.

    `parallel` counts among parallel questions, `wrong_parallel` among the others; `redundant` (a search after a
    sufficient one) and `broken` (one malformed turn) come on top of any policy that searches.
    """

    direct: float = 0.04
    parallel: float = 0.25
    wrong_parallel: float = 0.08
    redundant: float = 0.08
    broken: float = 0.2
    miss: float = 0.06  # a first query that finds another document
    miss_again: float = 0.3  # the same for later queries of the same lookup
    nothing: float = 0.1  # misses that bring no document at all
    side_by_side: bool = True  # two cities are said once more, next to each other, before they are compared


def queries_of(world: World, lookup: Lookup) -> tuple[str, ...]:
    """Plausible queries for a lookup, the usual ones first, the title alone last."""
    group = next(g for g in ("persons", "films", "cities") if lookup.title in getattr(world, g))
    return (*(f"{lookup.title} {p}" for p in PHRASES[group, lookup.attribute]), lookup.title)


class Teller:
    """Tells one trajectory for a task; `rng` makes every choice."""

    def __init__(self, rng: random.Random, world: World, task: Task, protocol: Protocol, mix: Mix):
        self.rng, self.world, self.task, self.protocol, self.mix = rng, world, task, protocol, mix
        before, *after = protocol.render_prompt(task.text).split(DOCUMENTS)
        self.segments: Segments = [("prompt", before)]
        self.after_documents = after
        self.extra: Segments = []  # of extra calls that read documents, each a ("prompt", ..) and a ("policy", ..)
        self.found: dict[Lookup, str] = {}
        self.tries: dict[Lookup, int] = {}

    def tell(self) -> Segments:
        if self.rng.random() < self.mix.direct or not self.protocol.searches:
            self._read_first()
            self._turn(" I know.", answer=self._guess())
            return self.segments
        if self.protocol.documents_first:
            self._tell_from_documents()
            return self.segments
        broken_at = self.rng.randrange(3) if self.rng.random() < self.mix.broken else -1
        first = self._plan()
        said = f" Look up {' and '.join(dict.fromkeys(lookup.title for lookup in first))}."
        queries, turn = first, 0
        while queries:
            self._search(said, queries, broken=turn == broken_at)
            turn += 1
            said, queries = self._next(queries)
        if self.rng.random() < self.mix.redundant and self.found:
            again = self.rng.choice(list(self.found))
            self._search(f"{said} Check {again.title}.", [again], broken=turn == broken_at)
            turn += 1
        self._turn(said, answer=self._conclude(), broken=turn == broken_at)
        return self.segments

    def _read_first(self) -> list[Lookup]:
        """The documents that the question itself finds, where the protocol begins with them."""
        if not self.protocol.documents_first:
            return []
        lookups = self.task.lookups
        asked = self.rng.choice(lookups) if self.task.kind == "parallel" else lookups[0]
        chance = QUESTION_MISSES[self.task.kind]
        self.segments.append(("docs", self.protocol.observation([self._retrieve(asked, chance)])))
        self.segments += [("notice", text) for text in self.after_documents]
        return [asked]

    def _tell_from_documents(self) -> None:
        """RAG answers at once, IRCoT asks a line a turn, Iter-RetGen answers anew after each of two more searches."""
        asked, searches = self._read_first(), 2 if self.protocol.search is None else 4
        if self.protocol.name == "rag":
            said, queries = self._next(asked)
            return self._turn(said, answer=self._conclude())
        for number in range(searches):
            said, queries = self._next(asked)
            if self.protocol.search is not None and not queries:
                break
            asked = queries or asked
            self._search(said, asked, broken=False)
            again = Turn(number + 2, question=self.task.text)
            self.segments += [("notice", text) for text in [self.protocol.before_turn(again)] if text]
        said, _ = self._next(asked)
        self._turn(said, answer=self._conclude())

    def _plan(self) -> list[Lookup]:
        """The lookups of the first search."""
        lookups = self.task.lookups
        if self.task.kind == "parallel" and self.protocol.separator and self.rng.random() < self.mix.parallel:
            return list(lookups)
        wrong = self.task.kind != "parallel" and self.protocol.separator
        if wrong and self.rng.random() < self.mix.wrong_parallel:
            return [lookups[0], lookups[0]]
        return [lookups[0]]

    def _next(self, asked: list[Lookup]) -> tuple[str, list[Lookup]]:
        """What to think now, and what to look up next (nothing: time to answer)."""
        missing = [x for x in dict.fromkeys(asked) if x not in self.found]
        facts = "".join(f" {x.title}: {self.found[x]}." for x in dict.fromkeys(asked) if x in self.found)
        if missing and self.tries[missing[0]] < 3:
            return f"{facts} No {missing[0].title}. Look up {missing[0].title}.", [missing[0]]
        if missing:
            return f" No {missing[0].title}.", []
        left = [x for x in self.task.lookups if x not in self.found]
        if left:
            return f"{facts} Look up {left[0].title}.", [left[0]]
        return self._summary(), []

    def _summary(self) -> str:
        lookups, found = self.task.lookups, self.found
        if self.task.kind != "parallel":
            return f" {lookups[-1].title}: {found[lookups[-1]]}."
        return compare(lookups, [found[x] for x in lookups], self.mix.side_by_side)

    def _conclude(self) -> str:
        return self.task.answer if len(self.found) == len(self.task.lookups) else self._guess()

    def _guess(self) -> str:
        task = self.task
        if task.kind == "parallel":
            return self.rng.choice(["yes", "no"] if task.template == "same_city" else [x.title for x in task.lookups])
        pool = {
            "year": names.YEARS,
            "city": tuple(self.world.cities),
            "profession": names.PROFESSIONS,
            "director": tuple(self.world.persons),
            "country": tuple(self.world.countries),
        }
        return str(self.rng.choice(pool[task.lookups[-1].attribute]))

    def _search(self, said: str, lookups: list[Lookup], broken: bool) -> None:
        queries = []
        for lookup in lookups:
            options = queries_of(self.world, lookup)
            usual = self.rng.choice(options[:-1])
            queries.append(options[-1] if self.tries.get(lookup, 0) % 2 else usual)  # after a miss the title alone
        if len(lookups) > 1 and lookups[0] == lookups[-1]:  # wrongly parallel: one fact asked in two ways
            queries = list(queries_of(self.world, lookups[0])[: len(lookups)])
        self._turn(said, search=f" {self.protocol.separator} ".join(queries), broken=broken)
        blocks = [self._retrieve(lookup) for lookup in lookups]
        if self.protocol.distil:
            blocks = [
                self._read(query, lookup, block) for query, lookup, block in zip(queries, lookups, blocks, strict=True)
            ]
        self.segments.append(("docs", self.protocol.observation(blocks)))

    def _read(self, query: str, lookup: Lookup, documents: str) -> str:
        """The extra call about a search: the fact if the document has it. What the policy sees of it."""
        said = "".join(text for source, text in self.segments if source == "policy")
        known = f" {lookup.title}: {value(self.world, lookup)}."
        told = f"{MARKER}:{known if f'(Title: {lookup.title})' in documents else f' {NO_INFORMATION}'}"
        self.extra += [("prompt", self.protocol.distil_prompt(said, query, documents)), ("policy", told + END)]
        return self.protocol.distilled(told)

    def _retrieve(self, lookup: Lookup, chance: float | None = None) -> str:
        """The top-1 document of a query, sometimes that of another entity with a name in common: by `chance`, or as the
        mix says."""
        tried = self.tries.get(lookup, 0)
        self.tries[lookup] = tried + 1
        if chance is None:
            chance = self.mix.miss if tried == 0 else self.mix.miss_again
        title = lookup.title
        if lookup in self.found or self.rng.random() >= chance:
            self.found[lookup] = value(self.world, lookup)
        elif self.rng.random() < self.mix.nothing:
            return ""
        else:
            title = self._decoy(title)
        return self.protocol.document(1, title, document(self.world, title))

    def _decoy(self, title: str) -> str:
        words = set(title.split())
        groups = (self.world.persons, self.world.films, self.world.cities)
        group = next(g for g in groups if title in g)
        alike = [t for t in group if t != title and words & set(t.split())]
        return self.rng.choice(alike or [t for t in group if t != title])

    def _turn(self, said: str, search: str = "", answer: str = "", broken: bool = False) -> None:
        first = not any(source == "policy" for source, _ in self.segments)
        if self.protocol.name == "iter_retgen" and not answer:
            answer = self._guess()
        told = spoken(self.protocol, said, search, answer, first)
        if broken and self.protocol.thought == "turn":
            self._break(said, told)
        elif broken and self.protocol.thought == "episode" and not search:
            self.segments.append(("policy", told.replace("</think>", self.rng.choice(["", "</think> so"]))))
        else:
            self.segments.append(("policy", told))

    def _break(self, said: str, told: str) -> None:
        """A turn of a thought and an action, malformed."""
        think, block = f"<think>{said}</think>", told[told.index("</think>") + len("</think>") :]
        content = block[block.index(">") + 1 : block.rindex("</")]
        fault = self.rng.choice(["no think", "open think", "stray", "no tags", "empty"])
        if fault in ("no tags", "empty"):  # no valid action: the environment says so, and the turn is told again
            bad = f"{content}{END}" if fault == "no tags" else "".join(self.protocol.search or self.protocol.answer)
            self.segments += [("policy", think + bad), ("notice", self.protocol.notice), ("policy", think + block)]
            return
        forms = {"no think": block, "open think": f"<think>{said}{block}", "stray": f"{think} so {block}"}
        self.segments.append(("policy", forms[fault]))


def spoken(protocol: Protocol, said: str, query: str, answer: str, first: bool) -> str:
    """A turn that thinks `said`, then searches for `query`, or without one answers, as the protocol has it."""
    opening, closing = (protocol.search if query else protocol.answer) or ("", "\n")
    block = f"{opening} {query or answer}{closing}"
    if protocol.thought == "turn":
        plan = said.join(protocol.plan) if first and protocol.plan else ""
        return f"{plan}<think>{said}</think>{block}"
    if protocol.thought == "episode":
        return f"{said} {block}" if query else f"{said}</think>{block}"
    return {
        "search_o1": f"{said} {block}" if query else f"{said} {opening} {answer}{closing}{END}",
        "self_ask": block if first else f"Intermediate answer:{said}\n{block}",
        "ircot": f" {query}\n" if query else f"{said} {block}",
        "iter_retgen": f"{said} {query}. {protocol.answer[0]} {answer}\n" if query else f"{said} {block}",
        "cot": f"{said} {block}",
    }.get(protocol.name, block)


def document(world: World, title: str) -> str:
    """The text of an entity's document."""
    groups = (world.persons, world.films, world.cities, world.countries)
    return next(g[title] for g in groups if title in g).document()


def compare(lookups: tuple[Lookup, ...], found: list[str], side_by_side: bool) -> str:
    """The thought that settles a parallel question. A year stands before its name, so that the name is copied from
    behind the year that was chosen, which a small model learns much sooner than to copy what stands before it."""
    if lookups[0].attribute == "city":
        facts = ", ".join(f"{lookup.title}: {city}" for lookup, city in zip(lookups, found, strict=True))
        again = f" {' '.join(found)}" if side_by_side else ""
        return f" {facts}.{again} {'Same' if found[0] == found[1] else 'Different'}."
    facts = [f"{year} {lookup.title}" for lookup, year in zip(lookups, found, strict=True)]
    return f" {', '.join(facts)}. First {min(facts)}."


def drill(task: Task, world: World, mix: Mix) -> tuple[str, str]:
    """(given, told): the last turn of a parallel task alone, cut where the comparison begins."""
    whole = compare(task.lookups, [value(world, x) for x in task.lookups], mix.side_by_side)
    cut = whole.index(".") + 1
    return f"<think>{whole[:cut]}", f"{whole[cut:]}</think><answer> {task.answer}</answer>"
