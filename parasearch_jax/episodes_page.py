"""episodes.html: trajectories before and after training on one page, which opens from disk and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from parasearch_jax.data.types import KINDS
from parasearch_jax.episode_html import as_text, episode_html, is_decomposed, is_right

MAX_BYTES = 4_900_000  # a mail or a browser on a phone takes it

Pair = tuple[Mapping | None, Mapping | None]  # records (`writers.episode_record`) before and after training

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 16px; color: #16181d;
  background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 20px; margin: 0 0 8px; } h2 { font-size: 16px; margin: 0; } h3 { font-size: 14px; margin: 0; }
p { margin: 4px 0; }
.bar { position: sticky; top: 0; background: #fff; padding: 8px 0; border-bottom: 1px solid #8a909a; z-index: 1;
  display: flex; flex-wrap: wrap; gap: 8px 28px; } .bar[hidden] { display: none; }
.group { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 6px; }
.label { color: #545a64; font-size: 13px; }
button { font: inherit; font-size: 14px; min-height: 32px; padding: 2px 10px; border: 1px solid #8a909a;
  border-radius: 4px; background: #fff; color: #16181d; cursor: pointer; }
button[aria-pressed=true] { background: #16181d; color: #fff; border-color: #16181d; }
:focus-visible { outline: 3px solid #0b62c4; outline-offset: 1px; }
.question { border-bottom: 1px solid #c9cdd3; padding: 16px 0; } .question[hidden] { display: none; }
.kind { font-size: 12px; font-weight: 600; padding: 1px 7px; border-radius: 9px; background: #e3ebf7; }
.gold, .facts { color: #545a64; font-size: 13px; }
.verdict { font-size: 13px; padding: 0 6px; border-radius: 3px; border: 1px solid currentColor; }
.verdict.right { color: #0f6b2f; } .verdict.wrong { color: #a3230f; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(0, 1fr)); gap: 24px; margin-top: 8px; }
.pair.two { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
.text { white-space: pre-wrap; unicode-bidi: plaintext; margin-top: 4px; }
.text span, .text mark, h2 span, .gold span { unicode-bidi: isolate; }
.masked { color: #545a64; background: #eef0f2; }
.query { background: #ffe08a; color: inherit; border-radius: 2px; } .sep { font-weight: 700; color: #8f3d00; }
.final { background: #c4ebce; color: inherit; border-radius: 2px; } .invalid { border-bottom: 2px dotted #a3230f; }
[data-note]::after { content: attr(data-note); font-size: 12px; color: #6b3d00; background: #fff4d6; padding: 0 5px;
  margin-left: 4px; border-radius: 9px; white-space: nowrap; }
.invalid[data-note]::after { color: #a3230f; background: #fdecea; }
details { margin: 2px 0; } summary { cursor: pointer; font-size: 13px; color: #545a64; padding: 2px 0; }
table { border-collapse: collapse; margin-top: 8px; font-size: 13px; } td { padding: 1px 12px 1px 0; }
td + td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.total td { border-top: 1px solid #8a909a; }
@media (max-width: 800px), (max-height: 600px) { .bar { position: static; } }
@media (max-width: 800px) {
  .pair.two { grid-template-columns: minmax(0, 1fr); gap: 12px; }
  .two .episode { border-left: 3px solid #c9cdd3; padding-left: 10px; } .label { min-width: 100%; }
}
"""

# The choice stands in the address (#kind=parallel&result=gained), so that it can be sent, and the back key works.
SCRIPT = """
const buttons = [...document.querySelectorAll("button[data-filter]")];
const questions = [...document.querySelectorAll(".question")];
const filters = [...new Set(buttons.map(b => b.dataset.filter))];
const has = (q, filter, value) => value === "all" || q.dataset[filter].split(" ").includes(value);
function chosen() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const known = (filter, value) => buttons.some(b => b.dataset.filter === filter && b.dataset.value === value);
  return Object.fromEntries(filters.map(f => [f, known(f, asked.get(f)) ? asked.get(f) : "all"]));
}
function apply() {
  const now = chosen();
  const fits = (q, except) => filters.every(f => f === except || has(q, f, now[f]));
  for (const b of buttons) {
    const { filter, value } = b.dataset;
    b.setAttribute("aria-pressed", now[filter] === value);
    b.querySelector(".count").textContent = questions.filter(q => fits(q, filter) && has(q, filter, value)).length;
  }
  for (const q of questions) q.hidden = !fits(q);
  const n = questions.filter(q => !q.hidden).length;
  document.getElementById("found").textContent = n ? `${n} of ${questions.length} below` : "no question fits";
}
for (const b of buttons) b.addEventListener("click", () => {
  location.hash = new URLSearchParams({ ...chosen(), [b.dataset.filter]: b.dataset.value });
});
const unfold = document.getElementById("unfold");
unfold.addEventListener("click", () => {
  const open = unfold.getAttribute("aria-pressed") !== "true";
  unfold.setAttribute("aria-pressed", open);
  for (const d of document.querySelectorAll("details")) d.open = open;
});
addEventListener("hashchange", apply);
document.querySelector(".bar").hidden = false;
apply();
"""

LEGEND = (
    '<span class="policy">Dark: sampled by the policy, trained on.</span> '
    '<span class="masked">Grey: prompt, documents and notices, masked, excluded from the loss.</span> '
    '<mark class="query">Yellow</mark>: executed queries, behind them their number, between sub-queries the '
    '<span class="sep">separator</span>. <mark class="final">Green</mark>: the executed answer. '
    '<span class="invalid">Dotted</span>: no valid action.'
)


def episodes_html(
    before: Sequence[Mapping],
    after: Sequence[Mapping],
    per_kind: int = 30,
    name: str = "",
) -> str:
    """One self-contained page: for each question its episode before and after training, side by side.

    Records as `writers.episode_record` has them; an evaluation alone has no `before`. What is masked and what is a
    query comes from the segments' sources and the actions' spans. All text is escaped, and the page's own policy
    (Content-Security-Policy) lets neither a script but ours run nor anything be loaded. At most `per_kind` questions a
    kind and MAX_BYTES bytes are shown; what is left out is told.
    """
    pairs = _pairs(before, after)
    both = bool(before) and bool(after)
    title = escape(f"{name}: " if name else "") + ("Episodes before and after training" if both else "Episodes")
    room = MAX_BYTES - len(STYLE + SCRIPT) - 8_000  # what stands around the questions
    shown, too_large = _fill(pairs, per_kind, room, both)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy()}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="legend">{LEGEND}</p>
<p class="facts">{_note(pairs, len(shown), per_kind, too_large)}</p>
<div class="bar" hidden>{_filters([pairs[place] for place in shown], both)}<div class="group">
<button id="unfold" aria-pressed="false">unfold prompts and documents</button>
<span id="found" class="facts" role="status"></span></div></div>
{"".join(shown.values())}
<script>{SCRIPT}</script>
</body>
</html>
"""


def _policy() -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (SCRIPT, STYLE)]
    script, style = (f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"


# ------------------------------------------------------------------------------------------------ which are shown


def _pairs(before: Iterable[Mapping], after: Iterable[Mapping]) -> list[Pair]:
    """(before, after) of the same question and sample, in order of appearance; None where one side has no episode."""
    sides = []
    for records in (before, after):
        seen = Counter()
        side = {}
        for record in records:
            key = (record.get("dataset", ""), record["id"], record.get("sample", 0))
            seen[key] += 1
            side[(*key, seen[key])] = record  # several episodes under one key are paired in order, none is dropped
        sides.append(side)
    return [(sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys([*sides[0], *sides[1]])]


def _fill(pairs: Sequence[Pair], per_kind: int, room: int, both: bool) -> tuple[dict[int, str], int]:
    """{place in `pairs`: HTML} of those that are shown, by kind, and the number that had no room.

    Of each kind up to half are pairs whose answer turned right or wrong, the rest the first ones. The kinds take turns,
    so that a lack of room takes from all of them.
    """
    kinds: dict[str, list[int]] = {}
    for place, pair in enumerate(pairs):
        kinds.setdefault(_question(pair)["kind"], []).append(place)
    queues = [_sampled(places, pairs, per_kind) for _, places in sorted(kinds.items(), key=lambda kv: _order(kv[0]))]
    shown, wanted = {}, [place for turn in itertools.zip_longest(*queues) for place in turn if place is not None]
    for place in wanted:
        html = _question_html(pairs[place], both)
        size = len(html.encode("utf-8", errors="replace"))
        if size <= room:
            shown[place] = html
            room -= size
    by_kind = sorted(shown, key=lambda place: (_order(_question(pairs[place])["kind"]), place))
    return {place: shown[place] for place in by_kind}, len(wanted) - len(shown)


def _sampled(places: Sequence[int], pairs: Sequence[Pair], per_kind: int) -> list[int]:
    changed = [place for place in places if {"gained", "lost"} & set(_results(pairs[place]))][: per_kind // 2]
    rest = [place for place in places if place not in set(changed)]
    return changed + rest[: per_kind - len(changed)]


def _note(pairs: Sequence[Pair], shown: int, per_kind: int, too_large: int) -> str:
    counts = Counter(token for pair in pairs for token in _results(pair))
    changed = counts["gained"] + counts["lost"]
    text = f"Shown: {shown} of {len(pairs)}, at most {per_kind} of each kind"
    if changed and shown < len(pairs):
        text += "; up to half of them are there because the answer turned right or wrong"
    text += ". "
    if too_large:
        text += f"For {too_large} more the page has no room. "
    if changed:
        text += f"Of all {len(pairs)}: {counts['gained']} wrong → right, {counts['lost']} right → wrong. "
    return text + "All are in episodes/*.jsonl."


def _question(pair: Pair) -> Mapping:
    return pair[0] if pair[0] is not None else pair[1]


def _order(kind: str) -> tuple[int, str]:
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)


# -------------------------------------------------------------------------------------------------------- filters


def _filters(pairs: Sequence[Pair], both: bool) -> str:
    """A row of buttons each for kind, answer and searches, where there is a choice; the script fills the counts in."""
    then = " after" if both else ""
    kinds = sorted({_question(pair)["kind"] for pair in pairs}, key=_order)
    results = {"right": f"right{then}", "wrong": f"wrong{then}", "gained": "wrong → right", "lost": "right → wrong"}
    splits = {"split": f"decomposed{then}", "whole": f"not decomposed{then}"}
    splits |= {"began": "newly decomposed", "ended": "no longer decomposed"}
    rows = [_filter("kind", "kind", {kind: kind for kind in kinds})]
    for key, label, tokens, names in (("result", "answer", _results, results), ("split", "searches", _splits, splits)):
        found = {token for pair in pairs for token in tokens(pair)}
        rows.append(_filter(key, label, {token: name for token, name in names.items() if token in found}))
    return "".join(rows)


def _filter(key: str, label: str, values: Mapping[str, str]) -> str:
    if len(values) < 2:
        return ""
    buttons = "".join(
        f'<button data-filter="{key}" data-value="{escape(value)}" aria-pressed="{str(value == "all").lower()}">'
        f'{escape(shown)} (<span class="count"></span>)</button>'
        for value, shown in {"all": "all", **values}.items()
    )
    return f'<div class="group" role="group" aria-label="{label}"><span class="label">{label}</span>{buttons}</div>'


def _results(pair: Pair) -> list[str]:
    return _tokens([is_right(record) for record in pair], ("wrong", "right"), ("lost", "gained"))


def _splits(pair: Pair) -> list[str]:
    return _tokens([is_decomposed(record) for record in pair], ("whole", "split"), ("ended", "began"))


def _tokens(sides: Sequence[bool | None], states: Sequence[str], changes: Sequence[str]) -> list[str]:
    """What the last side is, and what it has become if the first was not; None: not known."""
    known = [side for side in sides if side is not None]
    if not known:
        return []
    changed = len(set(known)) == 2
    return [states[known[-1]], changes[known[-1]]] if changed else [states[known[-1]]]


# ------------------------------------------------------------------------------------------------------- episodes


def _question_html(pair: Pair, both: bool) -> str:
    question = _question(pair)
    kind = escape(question["kind"])
    data = {"kind": kind, "result": " ".join(_results(pair)), "split": " ".join(_splits(pair))}
    attributes = "".join(f' data-{name}="{value}"' for name, value in data.items())
    sample = f"sample {question['sample']}" if question.get("sample") else ""
    about = as_text(" · ".join(filter(None, (question.get("dataset", ""), str(question["id"]), sample))))
    gold = as_text(" | ".join(question.get("golden_answers", ())))
    sides = [episode_html(side, record) for side, record in zip(("before", "after"), pair, strict=True)]
    if not both:
        sides = [episode_html("", record) for record in pair if record is not None]
    return (
        f'<section class="question"{attributes}>'
        f'<h2 dir="auto"><span class="kind">{kind}</span> <span>{as_text(question["question"])}</span></h2>'
        f'<p class="gold">gold: <span>{gold}</span> · <span>{about}</span></p>'
        f'<div class="pair{" two" * both}">{"".join(sides)}</div></section>\n'
    )
