"""The engine: many episodes over few slots, decoding in chunks on device while searches are under way.

The engine owns one event loop in a thread of its own, so `rollout` and `generate` work from a script and from inside a
running loop (Jupyter) alike. The device runs in a second thread; the loop never waits for it. What happens in the loop
stands in job.py, what the device does in shards.py and sampler.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import jax

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import Protocol, get_protocol
from parasearch_jax.retrieval import Retriever
from parasearch_jax.rollout import stops
from parasearch_jax.rollout.job import Group, Job
from parasearch_jax.rollout.sampler import Sampling
from parasearch_jax.rollout.shards import Shards
from parasearch_jax.rollout.slots import OnText, Run
from parasearch_jax.rollout.types import Episode
from parasearch_jax.sharding.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Limits of an episode and of the engine. All lengths are in tokens."""

    slots: int = 64  # episodes under way at once, on all devices of the run together
    chunk: int = 16  # decode steps on device between two looks of the host
    max_turns: int = 4  # searches and invalid actions; then one forced final generation
    max_turn_tokens: int = 500
    max_total_tokens: int = 4096  # prompt, turns and observations together
    observation_tokens: int = 500
    observation_variant: str = "paper"  # or "released", see observation.py
    topk: int = 3  # documents per sub-query
    search_seconds: float = 60.0  # a sub-query that has no answer by then has failed
    deterministic: bool = True  # await all outstanding searches before the next chunk

    def __post_init__(self):
        if not self.search_seconds > 0:
            raise UserError(f"rollout.search_seconds is {self.search_seconds}: give the seconds a search may take")
        for name in ("slots", "chunk", "max_turn_tokens", "max_total_tokens", "observation_tokens", "topk"):
            if getattr(self, name) < 1:
                raise UserError(f"rollout.{name} is {getattr(self, name)}, it must be >= 1")
        if self.max_turns < 0:
            raise UserError(f"rollout.max_turns is {self.max_turns}, it must be >= 0")
        if self.observation_variant not in ("paper", "released"):
            raise UserError(f"rollout.observation_variant is {self.observation_variant!r}; use one of: paper, released")


class Engine:
    """Generates episodes with the weights last given to `sync`.

    `stats` counts since the last `pop_stats`: seconds of prefill, decode and wait, tokens prefilled and sampled, decode
    steps (of the shard that made most) and slot steps (steps x slots, summed over the shards: what the tokens sampled
    could have been), sub-queries sent and failed, searches in which all of them failed, observation blocks cut.
    """

    def __init__(
        self,
        model,
        config: RolloutConfig | None = None,
        seed: int = 0,
        mesh: jax.sharding.Mesh | None = None,
        **changes,
    ):
        """`model` as `models.load_model` returns it; `changes` are fields of RolloutConfig (Engine(model, slots=8)).

        `mesh`: that of the whole run, of which the engine takes this process's devices, and their share of the slots;
        None: one device. Raises UserError if it does not divide the slots or the model.
        """
        self.config = dataclasses.replace(config or RolloutConfig(), **changes)
        self.model_config, self.tokenizer = model.config, model.tokenizer
        self._vocabulary = stops.token_bytes(self.tokenizer)
        if len(self._vocabulary) > model.config.vocab_size:
            raise UserError(
                f"The tokenizer has {len(self._vocabulary)} tokens, the model only {model.config.vocab_size}. "
                "Take the tokenizer that belongs to the model."
            )
        if mesh is None:
            mesh = make_mesh(devices=jax.local_devices()[:1])
        limits = self.config.slots, self.config.max_total_tokens, self.config.observation_tokens
        self.shards = Shards(model.config, mesh, *limits)
        self._tables: dict[Protocol | None, stops.Stops] = {}
        self.stats: dict[str, float] = {}
        self.device = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self._jobs: list[Job] = []  # of `rollout` and `generate`, under way or waiting for their turn, in order
        self.sessions: list[Session] = []  # open ones
        self.busy = asyncio.Lock()  # one job at a time; held in the loop, so that an interrupted caller can't drop it
        # Made in the device thread: here a `jax.set_mesh` of the caller might lay it on the devices of all hosts.
        self.key = self.device.submit(jax.random.key, seed).result()
        self.sync(model.params, version=0)

    def sync(self, params, version: int) -> None:
        """Takes new weights in the trainer's layout once no rollout is under way; episodes carry `version` from now on.

        Nothing of `params` is kept, so the trainer may donate them. With several hosts all of them call it together.
        """
        self._wait_for(self._sync(params, version))

    async def _sync(self, params, version: int) -> None:
        def take():
            self.shards.sync(params)
            self.version = version

        async with self.busy:
            await self.loop.run_in_executor(self.device, take)

    async def _idle(self):
        async with self.busy:  # behind all that had asked for it
            pass

    def rollout(
        self,
        questions: Sequence[Question],
        protocol: str | Protocol,
        retriever: Retriever | None,
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        step: int = 0,
        on_group: Callable[[int, list[Episode]], None] | None = None,
    ) -> list[Episode]:
        """`samples` episodes of each question, ordered by (question, sample), however they finish.

        Random numbers depend on (seed, step, question id, sample, position) only. temperature, top_p, top_k: see
        `Sampling`; the log-probs of an episode are those of the whole distribution at the temperature.

        `on_group(i, episodes)` gets the episodes of question i as soon as they and those of the questions before have
        ended, in a thread of its own, while others decode; what it raises cancels the rollout and is raised here.
        """
        protocol = get_protocol(protocol)
        if protocol.searches and (retriever is None or retriever.info.get("kind") == "none"):
            raise UserError(
                f"protocol {protocol.name!r} searches: give a retriever, config.retriever.kind is not 'none'"
            )
        sampling, groups = Sampling(temperature, top_p, top_k), []
        for question in questions:
            prompt, name = self.prompt(protocol, question.text), question.id
            episodes = [Episode(question_id=name, sample=i, protocol=protocol) for i in range(samples)]
            runs = [Run(e, prompt, _run_number(name, i), sampling, question) for i, e in enumerate(episodes)]
            groups.append(Group(runs))
        job = Job(self, protocol, retriever, step, self.config.max_turn_tokens)
        with in_order(on_group, groups, job.cancel):
            return self._finish(job, groups)

    def generate(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        step: int = 0,
    ) -> list[Episode]:
        """One plain continuation of each prompt, up to an end token; no tags, no search, no chat template."""
        sampling = Sampling(temperature, top_p, top_k)
        groups = [
            Group([Run(Episode(question_id=str(i)), (text, self.encode(text)), i, sampling)])
            for i, text in enumerate(prompts)
        ]
        return self._finish(Job(self, None, None, step, max_new_tokens), groups)

    def cancel(self) -> None:
        """Ends the `rollout` or `generate` under way, from any thread or a signal handler: it returns all its episodes,
        those that had not finished with the stop_reason "cancelled" and what they had said. Without one: nothing."""
        for job in self._jobs[:1]:
            job.cancel()

    def session(self, protocol: str | Protocol, retriever: Retriever) -> Session:
        """`with engine.session(...) as session`: episodes that are submitted one by one while others are under way.

        Raises UserError for a protocol that needs the question beside its prompt.
        """
        protocol = get_protocol(protocol)
        if protocol.documents_first:
            raise UserError(
                f"protocol {protocol.name!r} searches for the question itself: it can be evaluated, not served"
            )
        return Session(self, protocol, retriever)

    def pop_stats(self) -> dict[str, float]:
        stats, self.stats = self.stats, {}
        return stats

    def close(self) -> None:
        """Cancels what is under way and ends the engine's two threads; calling it again does nothing."""
        if self.loop.is_closed():
            return
        for job in list(self._jobs):  # first: they wait for a session's end to begin
            job.cancel()
        for session in list(self.sessions):
            session.end()
        self._wait_for(self._idle())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.device.shutdown()

    # ------------------------------------------------------------------------------------------------------ the loop

    def _finish(self, job: Job, groups: Sequence[Group]) -> list[Episode]:
        """The episodes of the groups, when all have ended."""
        runs = [run for group in groups for run in group.runs]
        for run in runs:
            self.check_prompt(run)
        for group in groups:
            job.add(group)
        self._jobs.append(job)
        try:
            self._wait_for(job.run())
        finally:
            self._jobs.remove(job)
        return [run.episode for run in runs]

    def check_prompt(self, run: Run) -> None:
        """Raises UserError for a prompt that is empty or leaves no room behind it."""
        if not run.prompt[1]:
            raise UserError(f"The prompt of question {run.episode.question_id!r} is empty: give it some text.")
        if len(run.prompt[1]) >= self.config.max_total_tokens:
            raise UserError(
                f"The prompt of question {run.episode.question_id!r} has {len(run.prompt[1])} tokens, "
                f"rollout.max_total_tokens is {self.config.max_total_tokens}: raise it or shorten the prompt."
            )

    def _wait_for(self, coroutine) -> None:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            future.result()
        except BaseException:  # Ctrl-C too
            future.cancel()
            raise

    def table(self, protocol: Protocol | None) -> stops.Stops:
        if protocol not in self._tables:
            cfg = self.model_config
            table = stops.build_stops(protocol, self._vocabulary, cfg.eos_token_ids, cfg.vocab_size)
            self._tables[protocol] = self.shards.put(table)
        return self._tables[protocol]

    def prompt(self, protocol: Protocol, question: str) -> tuple[str, list[int]]:
        """(text, ids) of a question's prompt, in the form that the protocol says."""
        text = protocol.render(self.tokenizer, question)
        return text, self.encode(text)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def count(self, name: str, amount: float = 1) -> None:
        self.stats[name] = self.stats.get(name, 0) + amount


ENDED = "the engine's session has ended"


class Session:
    """Episodes that come one by one and share the engine's slots, as a server has them.

    While it is open the engine's other calls wait. At its end what is under way is cancelled.
    """

    def __init__(self, engine: Engine, protocol: Protocol, retriever: Retriever):
        self._engine, self._protocol = engine, protocol
        self._job = Job(engine, protocol, retriever, 0, engine.config.max_turn_tokens, kept_open=True)
        self._futures: set[Future[Episode]] = set()
        self._ended: Future | None = None  # None: not begun

    def __enter__(self) -> Session:
        self._engine.sessions.append(self)
        self._ended = asyncio.run_coroutine_threadsafe(self._job.run(), self._engine.loop)
        self._ended.add_done_callback(self._fail)
        return self

    def submit(
        self,
        prompt: str,
        *,
        key: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int | None = None,
        on_text: OnText | None = None,
    ) -> Future[Episode]:
        """An episode for a prompt as the model gets it (rendered, in its chat template). `max_tokens`, of all its turns
        together, end it with `length`.

        `on_text(source, text)` is called in the engine's thread with what the policy says, in whole characters, and
        with documents and notices: together the text behind the prompt. What it raises ends the episode, and comes out
        of the future. `future.cancel()` frees the slot. Random numbers depend on (engine's seed, key, position). Raises
        UserError for a prompt that is empty or too long.
        """
        if self._ended is None:
            raise RuntimeError("the session has not begun: submit within `with engine.session(...) as session`")
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens}, it must be >= 1")
        engine, sampling = self._engine, Sampling(temperature, top_p, top_k)
        episode = Episode(question_id=str(key), protocol=self._protocol)
        future: Future[Episode] = Future()

        def tell(source: str, text: str) -> None:
            if future.done():
                return
            try:
                on_text(source, text)
            except BaseException as error:  # it ends its own episode, and not those of others
                _resolve(future, error)

        ids = engine.encode(prompt)
        run = Run(episode, (prompt, ids), key % 2**32, sampling, None, tell if on_text else None, max_tokens)
        engine.check_prompt(run)
        self._futures.add(future)

        def end(future: Future) -> None:
            self._futures.discard(future)
            if future.cancelled() or future.exception():
                self._job.cancel([run])

        future.add_done_callback(end)
        group = Group([run], on_end=lambda: _resolve(future, episode))
        engine.loop.call_soon_threadsafe(self._add, group, future)
        return future

    def _add(self, group: Group, future: Future) -> None:
        if self._ended.done():
            self._fail(self._ended)
        elif not self._job.kept_open:  # it is being left
            _resolve(future, RuntimeError(ENDED))
        elif not future.done():
            self._job.add(group)

    def _fail(self, ended: Future) -> None:
        """The job has ended: nobody will finish what is open."""
        error = None if ended.cancelled() else ended.exception()
        for future in list(self._futures):
            _resolve(future, error or RuntimeError(ENDED))

    def __exit__(self, *_) -> None:
        self.end()

    def end(self) -> None:
        """Cancels what is under way; `Engine.close` does it too."""
        if self in self._engine.sessions:
            self._engine.sessions.remove(self)
            self._job.cancel()
            self._ended.result()


def _resolve(future: Future, outcome: Episode | BaseException) -> None:
    """Unless it is cancelled, which may happen in another thread at this very moment."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


@contextlib.contextmanager
def in_order(
    on_group: Callable[[int, list[Episode]], None] | None, groups: Sequence[Group], cancel: Callable[[], None]
) -> Iterator[None]:
    """Has `on_group(i, episodes)` called for the groups in their order, each as early as possible, in a thread. Waits
    for the last at the end. When one fails `cancel` is called at once, none comes behind it, and its error is raised.
    """
    if on_group is None:
        yield
        return
    ended: set[int] = set()
    calls: list[Future] = []
    failed = threading.Event()

    def end(i: int) -> None:
        ended.add(i)
        while len(calls) in ended:
            episodes = [run.episode for run in groups[len(calls)].runs]
            calls.append(worker.submit(call, len(calls), episodes))

    def call(i: int, episodes: list[Episode]) -> None:
        if failed.is_set() or any(episode.stop_reason == "cancelled" for episode in episodes):
            return
        try:
            on_group(i, episodes)
        except BaseException:
            failed.set()
            cancel()
            raise

    for i, group in enumerate(groups):
        group.on_end = functools.partial(end, i)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="groups") as worker:
        yield
        for each in calls:
            each.result()


def _run_number(question_id: str, sample: int) -> int:
    """A number for (question, sample) that is the same in every process and batch."""
    return zlib.crc32(f"{question_id}\n{sample}".encode())
