"""Turns and the action each one is (case T03), shared by the parser's test and the stop automaton's.

CASES: (text, kind, payload, end). kind: search | answer | invalid; payload: the sub-queries, the answer, or None; end:
the character behind the closing tag that ends the turn, the text's length where none does (those texts are NO_STOP).
All for the protocol `parallel`.
"""

NINE = " ## ".join(f"q{i}" for i in range(9))


def _case(turn: str, kind: str, payload, rest: str = "") -> tuple:
    """The turn ends behind `turn`; `rest` is what a model without a stop would have gone on to write."""
    return turn + rest, kind, payload, len(turn)


_STOPPED = [
    _case("<search>a ## b</search>", "search", ("a", "b")),
    _case("<search> a ## ## b </search>", "search", ("a", "b")),
    _case("<search>a##a</search>", "search", ("a", "a")),  # both kept: n blocks come back for n queries
    _case("<search>a ##</search>", "search", ("a",)),
    _case("<search>\na\nb </search>", "search", ("a\nb",)),
    _case("<search>a # b</search>", "search", ("a # b",)),
    _case("<search>a</search>", "search", ("a",), rest="\n\n"),
    _case("<think>why</think>\n<search> a </search>", "search", ("a",), rest=" and more"),
    _case("<search></search>", "invalid", None),
    _case("<search> ## </search>", "invalid", None),
    _case("<search> \n </search>", "invalid", None, rest="<search>a</search>"),
    _case(f"<search>{NINE}</search>", "search", tuple(f"q{i}" for i in range(8))),  # one more counted, not sent
    # a closing tag counts only behind its opening tag
    _case("</search> x <search>a</search>", "search", ("a",)),
    _case("</answer></search><search>a</search>", "search", ("a",)),
    _case("</search><answer>b</answer>", "answer", "b"),
    # nested: the innermost clean block, and never a tag inside a query
    _case("<search><search>a</search>", "search", ("a",), rest="</search>"),
    _case("<search>x <search> a ## b </search>", "search", ("a", "b")),
    _case("<answer>x</search></answer>", "invalid", None),
    _case("<search>x</answer> y</search>", "invalid", None),
    _case("<search>a<answer>b</search>", "invalid", None, rest="</answer>"),
    _case("<search>a<answer>b</answer>", "answer", "b", rest="</search>"),
    # the first complete block decides
    _case("<search>a</search>", "search", ("a",), rest="<answer>b</answer>"),
    _case("<answer>b</answer>", "answer", "b", rest="<search>a</search>"),
    _case("<answer> no </answer>", "answer", "no", rest="<answer> yes </answer>"),
    _case("<answer></answer>", "answer", ""),
    _case("<answer> The Beatles </answer>", "answer", "The Beatles", rest=" and some more"),
    _case("<think>I could <search>a</search>", "search", ("a",), rest=" instead</think><answer>b</answer>"),
    # tags the protocol does not know are text
    _case("<information>x</information><search>a</search>", "search", ("a",)),
    _case("<Search>x</Search> <search>a < b > c</search>", "search", ("a < b > c",)),
    _case("<search>日本 ## é</search>", "search", ("日本", "é")),
]

NO_STOP = [
    "",
    "I do not know.",
    "<search>a",
    "<search>a</searc",
    "<search>a</search >",
    "a</search>",
    "</search><search>a",
    "</answer>b<answer>",
    "<search>a</answer>",
    "<answer>b</search>",
    "<think>done</think>",
]

CASES = _STOPPED + [(text, "invalid", None, len(text)) for text in NO_STOP]
