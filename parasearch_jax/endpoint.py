"""What our HTTP servers share: bodies within a limit, clients that hang up, a port taken early, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from parasearch_jax.errors import UserError

T = TypeVar("T")


async def read_json(request: Request, most: int) -> Any:
    """The JSON of a body of at most `most` bytes. HTTPException 413 for a longer one, 400 for what is no JSON."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"the body has more than {most} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from None


def json_response(content: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(json.dumps(content), status, headers, media_type="application/json")


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """What `work` brings; None, and it is cancelled, if the client hangs up before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM, when what is under way has been answered; a second signal does not wait."""

    def __init__(self, app: Any, **settings):
        super().__init__(uvicorn.Config(app, lifespan="off", **settings))

    def handle_exit(self, sig: int, frame: Any) -> None:
        # Not uvicorn's own, which raises the signal again at the end: nothing could be closed behind it.
        self.force_exit, self.should_exit = self.should_exit, True


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at that address, taken before anything is loaded in vain. Port 0 is any free one."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    with contextlib.closing(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except (OSError, OverflowError) as error:
            raise UserError(f"can't listen at --host={host} --port={port}: {error}; give another") from None
        yield listener


def address(host: str, listener: socket.socket) -> str:
    """http://host:port"""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
