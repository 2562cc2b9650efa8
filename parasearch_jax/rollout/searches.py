"""The searches of one action: all sub-queries in flight together, none of them for longer than the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from parasearch_jax.retrieval import Document, Retriever


async def search_all(
    retriever: Retriever, queries: Sequence[str], topk: int, seconds: float
) -> list[list[Document] | BaseException]:
    """The documents of each query, or why there are none: what the retriever raised, or a TimeoutError.

    A search that has no answer after `seconds` is cancelled, and nobody waits for its end: it may refuse, and what a
    retriever does in a thread of its own can't be stopped. (One that blocks in `search` itself blocks the event loop,
    and with it this clock.) Cancelling this ends all searches in the same way.
    """

    async def one(query: str) -> list[Document]:
        task = asyncio.ensure_future(retriever.search([query], topk))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a late error is nobody's
        try:
            await asyncio.wait([task], timeout=seconds)
            if not task.done():
                raise TimeoutError(f"no answer to {query!r:.80} within rollout.search_seconds={seconds:g}")
            (documents,) = task.result()
        finally:
            task.cancel()
        if not all(isinstance(document, Document) for document in documents):
            raise TypeError(f"the retriever gave no documents for {query!r:.80} but {documents!r:.80}")
        return list(documents)

    return await asyncio.gather(*map(one, queries), return_exceptions=True)
