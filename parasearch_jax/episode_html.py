"""One stored episode as HTML: what is masked in grey, queries and answer marked, reward parts. `episodes_page` has the
style of its classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

LONG = 1200  # characters of a documents' segment from which on it is folded
HEAD = 500  # characters of it that stand in front of the fold

# A browser drops or replaces these; blanks and line ends it shows as they are.
CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10, 13)}


def episode_html(side: str, record: Mapping | None) -> str:
    """`record` as `writers.episode_record` has it, None for none; `side` is its heading and class."""
    if record is None:
        return f'<div class="episode {side}"><h3>{side}</h3><p class="facts">no episode</p></div>'
    right = is_right(record)
    verdict = "" if right is None else _verdict("right" if right else "wrong")
    segments = record.get("segments", ())
    texts = "".join(_segment_html(i, segment, record) for i, segment in enumerate(segments))
    return (
        f'<div class="episode {side}"><h3>{side} {verdict}</h3><p class="facts">{_facts(record)}</p>'
        f'<div class="text">{texts}</div>{_extra_html(record)}{_parts_html(record)}</div>'
    )


def _verdict(name: str) -> str:
    return f'<span class="verdict {name}">{name}</span>'


def _facts(record: Mapping) -> str:
    """For example "2 turns, 1 search, 2 sub-queries, decomposed, ended by answer"."""
    queries = record.get("queries", ())
    facts = [
        _count(sum(segment["source"] == "policy" for segment in record.get("segments", ())), "turn"),
        _count(len(queries), "search", "searches"),
        _queries(sum(map(len, queries))),
        "decomposed" if is_decomposed(record) else "",
        f"ended by {record.get('stop_reason', '?')}",
        f"{record['dropped_queries']} sub-queries over the limit" if record.get("dropped_queries") else "",
        f"{record['failed_searches']} sub-queries failed" if record.get("failed_searches") else "",
    ]
    return as_text(", ".join(filter(None, facts)))


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _queries(n: int) -> str:
    return _count(n, "query", "sub-queries")


def _segment_html(index: int, segment: Mapping, record: Mapping) -> str:
    source, text = segment["source"], segment["text"]
    if source == "policy":
        return f'<span class="policy">{_policy_html(index, text, record)}</span>'
    if source == "prompt":  # long, and the same everywhere
        return _folded(f"prompt, {_count(len(text), 'character')}", _masked(source, text))
    if len(text) <= LONG:
        return _masked(source, text)
    cut = text.rfind(" ", 0, HEAD) + 1 or HEAD
    rest = _folded(f"… {_count(len(text) - cut, 'more character')}", _masked(source, text[cut:]))
    return _masked(source, text[:cut]) + rest


def _masked(source: str, text: str) -> str:
    return f'<span class="masked {escape(source)}" title="{escape(source)}, masked">{as_text(text)}</span>'


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def _policy_html(index: int, text: str, record: Mapping) -> str:
    """The text of policy segment `index`; in the span of its action the queries or the answer are marked."""
    action = next((action for action in record.get("actions", ()) if action["span"][0] == index), None)
    if action is None:
        return as_text(text)
    _, start, end = action["span"]
    end = start + len(text[start:end].rstrip())  # what is told behind the block stands on its last line
    kind, block = action["type"], text[start:end]
    tags = (record.get("tags") or {}).get(kind, ("", ""))
    if kind == "search":
        shown, note = _marked(block, action["queries"], tags, "query"), _queries(len(action["queries"]))
    elif kind == "answer":
        shown, note = _marked(block, [action["text"]], tags, "final"), ""
    else:
        shown, note = as_text(block), "no valid action"
    note = f' data-note="{note}"' if note else ""
    return f'{as_text(text[:start])}<span class="{kind}"{note}>{shown}</span>{as_text(text[end:])}'


def _marked(block: str, wanted: Sequence[str], tags: Sequence[str], css: str) -> str:
    """An action's text with `wanted` marked between its tags; what stands between two of them is the separator."""
    opening, closing = tags
    start = len(opening) if block.startswith(opening) else 0
    end = len(block) - len(closing) if closing and block.endswith(closing) else len(block)
    pieces, at = [], 0
    for n, (left, right) in enumerate(_places(block, wanted, start, end)):
        between = as_text(block[at:left])
        pieces += [f'<span class="sep">{between}</span>' if n else between]
        pieces += [f'<mark class="{css}">{as_text(block[left:right])}</mark>']
        at = right
    return "".join([*pieces, as_text(block[at:])])


def _places(block: str, wanted: Sequence[str], start: int, end: int) -> list[tuple[int, int]]:
    """Where each string stands in block[start:end], each behind the one before. A protocol may send a query otherwise
    than it was written (R1-Searcher drops quotes): then all that was written is one place."""
    places, at = [], start
    for string in wanted:
        left = block.find(string, at, end)
        if left < 0:
            content = block[start:end]
            left = start + len(content) - len(content.lstrip())
            places = [(left, left + len(content.strip()))]
            break
        at = left + len(string)
        places.append((left, at))
    return [(left, right) for left, right in places if left < right]


def _extra_html(record: Mapping) -> str:
    """The model calls beside the episode's turns (Search-o1's reading of documents), folded."""
    calls = record.get("extra") or ()
    return "".join(
        _folded(
            f"extra model call {n} of {len(calls)}, not trained on",
            f'<div class="text">{"".join(_masked(each["source"], each["text"]) for each in call)}</div>',
        )
        for n, call in enumerate(calls, 1)
    )


def _parts_html(record: Mapping) -> str:
    parts = record.get("parts") or {}
    if not parts:
        return ""
    rows = "".join(f"<tr><td>{as_text(str(k))}</td><td>{_signed(v)}</td></tr>" for k, v in parts.items())
    total = f'<tr class="total"><td>total reward</td><td>{_signed(record.get("total"))}</td></tr>'
    return f'<table class="parts">{rows}{total}</table>'


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"  # None: it was not finite


def is_right(record: Mapping | None) -> bool | None:
    return None if record is None or record.get("em") is None else record["em"] > 0


def is_decomposed(record: Mapping | None) -> bool | None:
    return None if record is None else any(len(queries) > 1 for queries in record.get("queries", ()))


def as_text(text: str) -> str:
    return escape(text.translate(CONTROLS))
