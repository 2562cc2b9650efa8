r"""An OpenAI-compatible endpoint that searches as the model was trained to (docs/serving.md).

    python -m parasearch_jax.rollout.serve --model=runs/parallel_tiny
    python -m parasearch_jax.rollout.serve --model=DIR --retriever=retriever.json --port=8000 --slots=8

--model is what `models.load_model` takes. If it is a run's work directory, or the model/ in one, then protocol, prompt,
retriever and limits are those of the run; flags go before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from parasearch_jax.errors import UserError
from parasearch_jax.programs import keep_programs

if __name__ == "__main__":
    keep_programs()  # before the first import of JAX

from parasearch_jax.rollout import openai_format as openai
from parasearch_jax.rollout.agent import Agent, Trace, make_parser, opened, read_settings
from parasearch_jax.rollout.openai_format import ApiError, ChatRequest
from parasearch_jax.rollout.types import Episode

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse
    from starlette.exceptions import HTTPException

    from parasearch_jax import endpoint
    from parasearch_jax.endpoint import address, bound, json_response, read_json, unless_gone
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: serving needs FastAPI and uvicorn ({error}): pip install -r requirements-serve.txt")

log = logging.getLogger("uvicorn.error")  # where the server's own lines go
MAX_BODY = 2**20  # bytes of a request


class Service:
    """What all requests share: the agent, and the episodes under way or waiting for a slot.

    `failed` is what ended the engine, None while it lives; `on_failure` is called then.
    """

    def __init__(self, agent: Agent, queue: int):
        self.agent, self.settings = agent, agent.settings
        self.slots, self.queue = agent.settings.rollout.slots, queue
        self.open: set[Future[Episode]] = set()
        self.closing = False
        self.failed: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def submit(self, request: ChatRequest, stream: bool) -> Episodes:
        """The episodes of a request, or an ApiError."""
        if self.failed is not None:
            raise ApiError(503, f"the engine has failed ({self.failed!r:.200}); start the server again")
        if self.closing:
            raise ApiError(503, "the server is shutting down")
        if len(self.open) + request.n > self.slots + self.queue:
            waiting = max(len(self.open) - self.slots, 0)
            told = f"all {self.slots} slots are taken, and {waiting} of {self.queue} places in the queue"
            raise ApiError(503, f"{told}; try again later", code="queue_full")
        return Episodes(self, request, self._prompt(request), stream)

    def _prompt(self, request: ChatRequest) -> str:
        """The prompt as the model gets it, after it was checked that it and the answer have room."""
        try:
            prompt = self.agent.prompt(request.messages)
        except UserError as error:
            raise ApiError(400, str(error), "messages") from error
        limits, length = self.settings.rollout, self.agent.tokens(prompt)
        if length >= limits.max_total_tokens:
            told = f"the prompt has {length} tokens, an episode here at most {limits.max_total_tokens}"
            raise ApiError(400, f"{told}, answer included; shorten it", "messages", "context_length_exceeded")
        return prompt

    def cancel_all(self) -> None:
        self.closing = True
        for future in list(self.open):
            future.cancel()

    def ended(self, future: Future[Episode]) -> None:
        self.open.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None and self.failed is None:
            self.failed = error
            log.error("the engine has failed: %r", error)
            self.on_failure()


class Episodes:
    """The episodes of one request: its choices. Whoever has it ends it by `cancel`, which frees slots still held."""

    def __init__(self, service: Service, request: ChatRequest, prompt: str, stream: bool):
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()
        self._service = service
        drawn = secrets.randbits(32) if request.seed is None else request.seed
        self._futures: list[Future[Episode]] = []
        for i in range(request.n):
            future = service.agent.session.submit(
                prompt,
                key=zlib.crc32(f"{drawn}\n{i}".encode()),
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                max_tokens=request.max_tokens,
                on_text=(lambda *said, i=i: self._tell(i, *said)) if stream else None,
            )
            service.open.add(future)
            self._futures.append(future)
            future.add_done_callback(lambda future, i=i: self._tell(i, "end", future))

    def _tell(self, choice: int, source: str, what: Any) -> None:
        """From the engine's thread to the server's loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended, nobody listens
            self._loop.call_soon_threadsafe(self._take, choice, source, what)

    def _take(self, choice: int, source: str, what: Any) -> None:
        if source == "end":
            self._service.ended(what)
        self._events.put_nowait((choice, source, what))

    async def events(self) -> AsyncIterator[tuple[int, str, str | Episode]]:
        """(choice, source, text) as it is said, and (choice, "end", episode) for each; ApiError if one can't end."""
        left = len(self._futures)
        while left:
            choice, source, what = await self._events.get()
            if source == "end":
                left -= 1
                if what.cancelled():
                    raise ApiError(503, "the server is shutting down")
                if what.exception() is not None:
                    raise ApiError(500, f"the engine has failed: {what.exception()!r:.200}")
                what = what.result()
            yield choice, source, what

    async def finished(self) -> list[Episode]:
        """All of them, in order, when the last has ended."""
        ended = {choice: what async for choice, source, what in self.events() if source == "end"}
        return [ended[choice] for choice in sorted(ended)]

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


# ------------------------------------------------------------------------------------------------------------------ app


def create_app(agent: Agent, queue: int = 64) -> FastAPI:
    """The endpoint over an open agent; `app.state.service` is its Service."""
    app = FastAPI(title="ParaSearch-JAX", docs_url=None, redoc_url=None, openapi_url=None)
    service = app.state.service = Service(agent, queue)
    name, created = agent.settings.name, int(time.time())

    @app.get("/health")
    async def health() -> Response:
        state = {"slots": service.slots, "open": len(service.open), "queue": service.queue}
        if service.failed is not None:
            return json_response({"status": "failed", "error": repr(service.failed)} | state, 503)
        return json_response({"status": "ok"} | state)

    @app.get("/v1/models")
    async def models() -> Response:
        model = {"id": name, "object": "model", "created": created, "owned_by": "parasearch-jax"}
        return json_response({"object": "list", "data": [model]})

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = openai.parse_request(await read_json(request, MAX_BODY), name, service.slots)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
        episodes = service.submit(asked, asked.stream)
        if asked.stream:
            return _Streamed(_chunks(head, agent, asked, episodes), episodes)
        try:
            ended = await unless_gone(request, episodes.finished())
        finally:
            episodes.cancel()
        told = openai.completion(head, agent.settings.protocol, ended) if ended else {}
        return json_response(told, 200 if ended else 499)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return json_response(error.body(), error.status, {"Retry-After": "1"} if error.status == 503 else None)

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        told = f"{request.method} {request.url.path}: {error.detail}"
        return json_response(ApiError(error.status_code, told).body(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:  # its traceback goes to the log
        return json_response(ApiError(500, f"the server has a fault: {error!r:.200}").body(), 500)

    return app


class _Streamed(StreamingResponse):
    """Server-sent events. However it ends, with a client that hangs up too, its episodes have ended then."""

    def __init__(self, chunks: AsyncIterator[str], episodes: Episodes):
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._episodes = episodes

    async def __call__(self, *args) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._episodes.cancel()


async def _chunks(head: dict, agent: Agent, asked: ChatRequest, episodes: Episodes) -> AsyncIterator[str]:
    """The events of a streamed answer: roles, then what is said as it comes, an ending for each choice, the usage."""
    traces = [Trace(agent.settings.protocol) for _ in range(asked.n)]
    ended: dict[int, Episode] = {}

    def event(content: dict) -> str:
        usage = {"usage": None} if asked.include_usage and "choices" in content else {}
        return f"data: {json.dumps(usage | content)}\n\n"

    for i in range(asked.n):
        yield event(openai.chunk(head, i, {"role": "assistant", "content": ""}))
    try:
        async for i, source, what in episodes.events():
            pieces = traces[i].end(what) if source == "end" else traces[i].feed(source, what)
            for piece in pieces:
                yield event(openai.chunk(head, i, openai.delta(*piece)))
            if source == "end":
                ended[i] = what
                yield event(openai.chunk(head, i, {}, openai.ending(what)))
    except ApiError as error:  # the status line is long gone
        yield event(error.body())
    else:
        if asked.include_usage:
            counts = openai.usage([ended[i] for i in sorted(ended)])
            yield event({**head, "object": "chat.completion.chunk", "choices": [], "usage": counts})
    yield "data: [DONE]\n\n"


# --------------------------------------------------------------------------------------------------------------- server


class Server(endpoint.Server):
    """At its end open episodes are cancelled, their clients told; it ends by itself when the engine has failed."""

    def __init__(self, app: FastAPI, **settings):
        super().__init__(app, **settings)
        self._service = app.state.service
        self._service.on_failure = lambda: setattr(self, "should_exit", True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.cancel_all()  # else it would wait for their ends
        await super().shutdown(sockets)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--slots", type=int, default=8, help="episodes under way at once (default: 8)")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--queue", type=int, default=64, help="episodes that may wait for a slot (default: 64)")
    args = parser.parse_args(argv)
    settings = read_settings(args)
    with bound(args.host, args.port) as listener, opened(settings) as agent:
        url = address(args.host, listener)
        print(f"{settings.name} at {url}/v1, protocol {settings.protocol.name}, {agent.settings.rollout}", flush=True)
        Server(create_app(agent, args.queue)).run(sockets=[listener])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:  # while it was loading
        sys.exit(130)
