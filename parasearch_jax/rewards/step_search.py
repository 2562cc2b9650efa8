"""The reward of StepSearch (arXiv 2505.15107): F1 of the answer, search keys, and a reward for every search.

    R = F1 (0 if ill-formed) + gamma_key * r_key,    on the last token
    r_t = scale * (gain_t - redundancy_t),           on the last token of search t

Released code: `verl/utils/reward_score/qa_step.py`, placed by `verl/trainer/main_ppo.py`. A question needs, in `meta`:

    search_keys   [[key, ...], ...]: for each sub-question the wordings of a good query
    support_docs  [{"paragraph_text": ...}, ...]: the documents that answer it

Not kept from the released code: a step reward lies on the token of its search here, there where the text before it,
encoded anew, ends; and a search tag in a notice shifts no step rewards, as they belong to executed searches.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from parasearch_jax.data import metrics
from parasearch_jax.data.metrics import normalize_released
from parasearch_jax.data.types import Question
from parasearch_jax.protocol import Protocol
from parasearch_jax.rewards import format as form
from parasearch_jax.rewards.base import register
from parasearch_jax.rollout.types import Answer, Episode, Search

QUIRKS = {
    "last_answer": form.LAST_ANSWER,
    "squad_f1": "tokens by SQuAD's normaliser, which leaves none of the golden answer 'A': nothing earns it",
    "minus_one": "without an answer block at the end of the text the reward is -1 and no search is rewarded; no other "
    "format is asked for",
    "text_queries": "queries are all '<search>..</search>' pairs in the text, executed or not, in notices too, and "
    "each is one query",
    "last_query": "of the queries that are nearest to the same keys the last counts, not the best; a query counts for "
    "the keys nearest to it alone",
    "fit_per_document": "TF-IDF weights are fitted anew for every retrieved document, with it among the golden ones, "
    "so that gains of different searches are on different scales",
    "double_step": "step rewards are 1 + scale times gain - redundancy (a row is added to itself), not scale times",
}

_WORD = re.compile(r"\b\w\w+\b")  # scikit-learn's TfidfVectorizer: words of two letters or more


def lacks(question: Question) -> str:
    """What the question's `meta` has not that the reward reads; "" if nothing."""
    keys, docs = question.meta.get("search_keys"), question.meta.get("support_docs")
    if not _listed(keys) or not all(_listed(group) and all(isinstance(k, str) for k in group) for group in keys):
        return f"meta['search_keys'] (a list of lists of texts; it is {keys!r:.60})"
    if not _listed(docs) or not all(isinstance(d, Mapping) and isinstance(d.get("paragraph_text"), str) for d in docs):
        return f"meta['support_docs'] (a list of {{'paragraph_text': text}}; it is {docs!r:.60})"
    return ""


@register("step_search", quirks=QUIRKS, lacks=lacks)
def step_search(
    episode: Episode,
    question: Question,
    *,
    quirks: frozenset[str] = frozenset(),
    gamma_key: float = 0.618,
    scale: float = 0.6,
) -> tuple[dict[str, float], list[tuple[int, float]]]:
    """Parts, and steps for the executed searches:

    answer  F1 of the answer
    format  -F1 if the episode is ill-formed: it needs a thought, an executed search and one answer, its end
    key     gamma_key * r_key, r_key = mean over the sub-questions of the best F1 of a query with one of its keys
    steps   scale * (gain - redundancy). gain: by how much the search's documents come nearer to the golden ones than
            all before, mean over these of the TF-IDF cosine; redundancy: share of its documents that were seen before.
            Metrics have their sum as `steps`.

    `paper`: TF-IDF weights come from the golden documents alone, so that all searches are measured alike; the paper
    says neither that nor `scale` (0.6 in the code's arguments). `released`: `QUIRKS`.
    """
    measure = metrics.f1_released if "squad_f1" in quirks else metrics.f1
    f1 = measure(form.answer_of(episode, quirks), question.golden_answers)
    if "minus_one" in quirks and not _ends_with_answer(episode):
        return {"answer": f1, "format": -1.0 - f1, "key": 0.0}, []
    ill_formed = "minus_one" not in quirks and not _well_formed(episode)
    factor = 1 + scale if "double_step" in quirks else scale
    steps = [(i, factor * value) for i, value in step_values(episode, question, "fit_per_document" in quirks)]
    key = gamma_key * _key_score(_queries(episode, quirks), question.meta["search_keys"], measure, quirks)
    return {"answer": f1, "format": -f1 if ill_formed else 0.0, "key": key}, steps


def _listed(value) -> bool:
    """Whether it is a list with something in it, be it of Python or of numpy (parquet files)."""
    return not isinstance(value, str | Mapping) and hasattr(value, "__len__") and len(value) > 0


# --------------------------------------------------------------------------------------------------------------- format


def _well_formed(episode: Episode) -> bool:
    tags = form.tags_of(form.protocol_of(episode))
    said = "".join(s.text for s in episode.segments if s.source == "policy")
    answered = bool(episode.actions) and isinstance(episode.actions[-1], Answer)
    thought = tags.think[0] in said and tags.think[1] in said
    return answered and thought and bool(episode.searches) and said.count(tags.answer[1]) == 1


def _ends_with_answer(episode: Episode) -> bool:
    text, tags = form.released_text(episode), form.tags_of(form.protocol_of(episode))
    if form.last_answer(text, tags) is None:
        return False
    return not text.rpartition(tags.answer[1])[2].strip()


# ----------------------------------------------------------------------------------------------------------------- keys


def _queries(episode: Episode, quirks: frozenset[str]) -> list[str]:
    if "text_queries" not in quirks:
        return [query for search in episode.searches for query in search.queries]
    opening, closing = map(re.escape, form.tags_of(form.protocol_of(episode)).search)
    return re.findall(f"{opening}(.*?){closing}", form.released_text(episode), re.DOTALL)


def _key_score(queries: Sequence[str], keys: Sequence[Sequence[str]], measure, quirks: frozenset[str]) -> float:
    """r_key in [0, 1]."""
    scores = [[measure(query, list(group)) for group in keys] for query in queries]
    if "last_query" not in quirks:
        return sum(max((row[k] for row in scores), default=0.0) for k in range(len(keys))) / len(keys)
    found: dict[int, float] = {}
    for row in scores:
        if max(row) > 0:
            found[row.index(max(row))] = max(row)
    return sum(found.values()) / len(keys)


# ---------------------------------------------------------------------------------------------------------------- steps


def step_values(episode: Episode, question: Question, fit_per_document: bool) -> list[tuple[int, float]]:
    """(action index, gain - redundancy) of each executed search."""
    golds = [normalize_released(doc["paragraph_text"]) for doc in question.meta["support_docs"]]
    nearest, seen, out = [0.0] * len(golds), set(), []
    for i, action in enumerate(episode.actions):
        if not isinstance(action, Search):
            continue
        documents, again = _documents(episode, action), 0
        reached = list(nearest)
        for document in documents:
            again += document in seen
            seen.add(document)
            near = tfidf_cosines(normalize_released(document), golds, fit_per_document)
            reached = [max(pair) for pair in zip(reached, near, strict=True)]
        gain = sum(reached) / len(golds) - sum(nearest) / len(golds)
        out.append((i, gain - (again / len(documents) if documents else 0.0)))
        nearest = reached
    return out


def _documents(episode: Episode, search: Search) -> list[str]:
    """The documents shown for a search, without number and title; none if the search failed."""
    head = _document_head(form.protocol_of(episode))
    return [document.strip() for document in head.split(form.shown(episode, search.span[0] + 1))[1:]]


def _document_head(protocol: Protocol) -> re.Pattern:
    """What the protocol writes before a document's text: "Doc 1(Title: T) " for Search-R1's."""
    head = re.escape(protocol.document(90909, "\1", "\2").partition("\2")[0])
    return re.compile(head.replace("90909", r"\d+").replace("\1", "[^\n]*?"))


def tfidf_cosines(text: str, golds: Sequence[str], fit_with_text: bool) -> list[float]:
    """Cosine of a text with each golden one, in [0, 1], words weighted by count * (ln((1 + N) / (1 + df)) + 1).

    df counts the golden texts that have the word, N all of them; with `fit_with_text` the text is one of them too, as
    scikit-learn's TfidfVectorizer has it when fitted on all. A text without a word of two letters is near to none.
    """
    counts = [Counter(_WORD.findall(t)) for t in (text, *golds)]
    fitted = counts if fit_with_text else counts[1:]
    df = Counter(word for count in fitted for word in count)
    weighted = [{w: n * (math.log((1 + len(fitted)) / (1 + df[w])) + 1) for w, n in count.items()} for count in counts]
    norms = [math.sqrt(sum(value * value for value in vector.values())) for vector in weighted]
    mine, mine_norm = weighted[0], norms[0]
    dots = [sum(value * other.get(word, 0.0) for word, value in mine.items()) for other in weighted[1:]]
    return [dot / (mine_norm * norm) if dot else 0.0 for dot, norm in zip(dots, norms[1:], strict=True)]
