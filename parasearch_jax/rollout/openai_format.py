"""OpenAI's chat completions as `serve` speaks them: requests in, answers, chunks and errors out. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from parasearch_jax.protocol import Protocol
from parasearch_jax.rollout.agent import replay
from parasearch_jax.rollout.types import Episode

ROLES = ("system", "user", "assistant")
# Accepted and without effect: they don't change what is sampled.
HARMLESS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "prediction"}
# Would change the answer, and can't be had; these values (and null) ask for nothing.
NEUTRAL = {
    "stop": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "verbosity": (),
    "audio": (),
    "web_search_options": (),
}
STOPS = "the model stops at the tags of its protocol and at its end tokens"
REASONS = {"stop": STOPS, "tools": "the only tool is the retriever that the server was started with"}


class ApiError(Exception):
    """What the client is told, with its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """What a request asks for. `messages` are {"role", "content"}, the last one the user's."""

    messages: tuple[dict[str, str], ...]
    stream: bool
    include_usage: bool
    n: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    max_tokens: int | None  # of all turns together


# -------------------------------------------------------------------------------------------------------------- request


def parse_request(body: Any, model: str, most: int) -> ChatRequest:
    """The request in `body` (parsed JSON) to the model of that name, of at most `most` choices.

    Raises ApiError naming the first field that is wrong, unknown, or asks for what can't be had.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body must be a JSON object with 'messages'")
    given = {key: value for key, value in body.items() if value is not None}
    read = {field.name for field in dataclasses.fields(ChatRequest)} - {"include_usage"}
    read |= {"model", "max_completion_tokens", "stream_options"}
    for key in (key for key in given if key not in read | HARMLESS):
        if key not in NEUTRAL:
            raise ApiError(400, f"{key!r:.80} is unknown here; leave it out", key, "unknown_parameter")
        if not any(given[key] == value for value in NEUTRAL[key]):
            why = REASONS.get(key, "this server can't do it")
            raise ApiError(400, f"{key!r} is not supported: {why}; leave it out", key, "unsupported_parameter")
    if given.get("model", model) != model:
        raise ApiError(
            404, f"model {given['model']!r:.80} is not served here, {model!r} is", "model", "model_not_found"
        )
    stream = _boolean(given, "stream")
    if {"max_tokens", "max_completion_tokens"} <= given.keys():
        raise ApiError(400, "give max_tokens or max_completion_tokens, not both", "max_tokens")
    limit = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return ChatRequest(
        messages=_messages(given.get("messages")),
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream),
        n=_number(given, "n", 1, 1, most),
        temperature=_number(given, "temperature", 1.0, 0, 2),
        top_p=_number(given, "top_p", 1.0, 1e-6, 1),
        top_k=_number(given, "top_k", 0, 0, 2**31 - 1),
        seed=_number(given, "seed", None, -(2**63), 2**63 - 1),
        max_tokens=_number(given, limit, None, 1, 2**31 - 1),
    )


def _number(given: Mapping, name: str, default: int | float | None, low: float, high: float) -> Any:
    """A field of the default's type; an int where that is None."""
    if name not in given:
        return default
    value, kind = given[name], float if isinstance(default, float) else int
    fits = isinstance(value, int | kind) and not isinstance(value, bool) and low <= value <= high
    if not fits:
        what = "a number" if kind is float else "a whole number"
        raise ApiError(400, f"{name} is {value!r:.80}; it must be {what} from {low:g} to {high:g}", name)
    return kind(value)


def _boolean(given: Mapping, name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is {value!r:.80}; it must be true or false", name)
    return value


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise ApiError(400, "stream_options goes with stream=true only", "stream_options")
    if not isinstance(options, Mapping) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, f"stream_options is {options!r:.80}; known is include_usage", "stream_options")
    if options.get("include_obfuscation"):
        raise ApiError(400, "stream_options.include_obfuscation is not supported; leave it out", "stream_options")
    return _boolean(options, "include_usage")


def _messages(given: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be a list with at least one message", "messages")
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(given))
    if messages[-1]["role"] != "user":
        role = messages[-1]["role"]
        raise ApiError(400, f"the last message is of role {role!r}; it must be the user's question", "messages")
    return messages


def _message(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ApiError(400, f"{where} is {given!r:.80}; it must be an object with role and content", "messages")
    # What an answer of ours carries on top is left out: a client may send its messages back as they came.
    unknown = {key for key, value in given.items() if value} - {"role", "content", "name", "reasoning_content"}
    if unknown:
        raise ApiError(400, f"{where} has {min(unknown)!r:.80}, which is not supported; leave it out", "messages")
    if given.get("role") not in ROLES:
        found = f"{where}.role is {given.get('role')!r:.80}"
        raise ApiError(400, f"{found}; it must be one of {', '.join(ROLES)}", "messages")
    return {"role": given["role"], "content": _content(given.get("content"), where)}


def _content(given: Any, where: str) -> str:
    """Text, or parts of type text."""
    if isinstance(given, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in given):
            raise ApiError(400, f"{where}.content has a part that is no text; this model reads text only", "messages")
        texts = [part.get("text") for part in given]
    else:
        texts = [given]
    if not all(isinstance(text, str) for text in texts) or not "".join(texts).strip():
        raise ApiError(400, f"{where}.content must be text, and not empty", "messages")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:  # JSON can hold one half of a pair: "\ud800"
        raise ApiError(400, f"{where}.content holds half of a surrogate pair; send valid Unicode", "messages") from None
    return "".join(texts)


# --------------------------------------------------------------------------------------------------------------- answer


def completion(head: Mapping[str, Any], protocol: Protocol, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The answer to a request. `head` has id, created and model."""
    choices = []
    for i, episode in enumerate(episodes):
        trace = "".join(text for kind, text in replay(protocol, episode) if kind != "answer")
        message = {"role": "assistant", "content": episode.answer or "", "reasoning_content": trace, "refusal": None}
        choices.append({"index": i, "message": message, "logprobs": None} | ending(episode))
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage(episodes)}


def chunk(head: Mapping[str, Any], index: int, delta: Mapping[str, str], end: Mapping | None = None) -> dict[str, Any]:
    """A part of choice `index` of a streamed answer; `end` is its `ending`, with the last."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | (end or {})
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def delta(kind: str, text: str) -> dict[str, str]:
    """A piece of `agent.Trace`."""
    return {"content" if kind == "answer" else "reasoning_content": text}


def ending(episode: Episode) -> dict[str, Any]:
    """How an episode ended, and what it did."""
    return {
        "finish_reason": "stop" if episode.stop_reason in ("answer", "eos") else "length",
        "parasearch": {
            "stop_reason": episode.stop_reason,
            "turns": episode.turns,
            "searches": len(episode.searches),
            "queries": [list(search.queries) for search in episode.searches],
            "failed_searches": episode.failed_searches,
            "dropped_queries": episode.dropped_queries,
        },
    }


def usage(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Tokens of the request: its prompt once, and what was sampled for all choices. Documents and notices, which the
    model read on top, stand in the details."""
    prompt = _tokens(episodes[:1], "prompt")
    sampled = _tokens(episodes, "policy")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "completion_tokens_details": {"environment_tokens": _tokens(episodes, "docs", "notice")},
    }


def _tokens(episodes: Sequence[Episode], *sources: str) -> int:
    return sum(len(s.ids) for episode in episodes for s in episode.segments if s.source in sources)
