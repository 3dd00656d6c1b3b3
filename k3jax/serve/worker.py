"""The thread that owns the model, and the bounded queue in front of it.

One generation runs at a time. The event loop only ever waits for a queue, so the server answers
while a model runs.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from k3jax.engine.request import SamplingParams
from k3jax.errors import RequestError
from k3jax.serve.outputs import Output, Step
from k3jax.serve.protocol import Problem, problem_of

logger = logging.getLogger(__name__)


class Generator(Protocol):
    """What the server needs of `k3jax.generation.Generator`."""

    max_model_len: int
    vocab_size: int

    def stream(
        self, prompt_ids: list[int], params: SamplingParams, stop_token_ids: frozenset[int]
    ) -> Iterator[list[int]]:
        """Lists of new ids until `params.max_tokens` or a stop id, which is the last one then.
        Closing the iterator cancels."""


class Job:
    """The outputs of one request on their way through the worker. Made in the event loop."""

    def __init__(self, outputs: list[Output]):
        self.outputs = outputs
        self.cancelled = False
        self.disconnected = False  # the client is gone
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()

    async def next(self, timeout_s: float | None = None) -> Step | None:
        """The next step, None behind the last one. Raises what the generation raised, and
        `TimeoutError` when nothing came in time."""
        event = await asyncio.wait_for(self._events.get(), timeout_s)
        if isinstance(event, BaseException):
            raise event
        return event

    def post(self, event: Step | BaseException | None) -> None:
        """Hands an event to the request, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Worker:
    """Loads the model in a thread of its own and serves jobs in the order of their arrival."""

    def __init__(self, load: Callable[[], Generator], max_waiting: int):
        self._load = load
        self._max_waiting = max_waiting
        self._generator: Generator | None = None
        self._failure: BaseException | None = None
        self._loaded = threading.Event()
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._draining = False
        self._closed = False
        # A daemon, so that an interrupt while the model loads ends the process.
        self._thread = threading.Thread(target=self._main, name="k3jax-worker", daemon=True)

    # -- life

    def start(self) -> None:
        """Loads the model and returns when it can serve; raises what went wrong."""
        self._thread.start()
        while not self._loaded.wait(timeout=0.2):  # in slices, so that signals are handled
            pass
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Takes no more jobs and gives up those that wait; the one that runs may end."""
        with self._changed:
            self._draining = True
            waiting, self._waiting = self._waiting, deque()
        for job in waiting:
            job.post(shutting_down())

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends everything, the running job at its next step."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify()
            if self._running is not None:
                self._running.cancelled = True
                self._running.post(shutting_down())
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """The model can still be reached."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """A request would be taken."""
        return self.alive and not self._draining

    @property
    def generator(self) -> Generator:
        """The loaded model."""
        assert self._generator is not None, "start() has not returned"
        return self._generator

    # -- jobs

    def check_room(self) -> None:
        """Raises the `Problem` with which a job would be refused now."""
        if not self.ready:
            raise shutting_down()
        if len(self._waiting) >= self._max_waiting:
            raise Problem(
                429,
                f"{self._max_waiting} requests are waiting already: try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def submit(self, job: Job) -> None:
        """Queues a job."""
        with self._changed:
            self.check_room()
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Gives a job up: at once if it waits, at the next step if it runs."""
        with self._changed:
            job.cancelled = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(job)
        job.post(None)

    # -- the thread

    def _main(self) -> None:
        try:
            self._generator = self._load()
        except BaseException as failure:
            self._failure = failure
            return
        finally:
            self._loaded.set()
        while (job := self._take()) is not None:
            try:
                self._run(job)
                job.post(None)
            except RequestError as error:
                job.post(error)
            except Exception as error:
                logger.exception("a generation failed")
                job.post(problem_of(error))

    def _take(self) -> Job | None:
        with self._changed:
            self._running = None
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _run(self, job: Job) -> None:
        for output in job.outputs:
            stream = self.generator.stream(output.prompt_ids, output.params, output.stop_token_ids)
            with contextlib.closing(stream):  # type: ignore[type-var]
                for token_ids in stream:
                    if job.cancelled:
                        return
                    job.post(output.feed(token_ids))
                    if output.finish_reason is not None:
                        break
            if output.finish_reason is None:
                job.post(output.finish())


def shutting_down() -> Problem:
    """The answer to requests that come, or are still there, when the server ends."""
    return Problem(
        503,
        "the server is shutting down",
        kind="service_unavailable_error",
        code="shutting_down",
        headers={"Retry-After": "1"},
    )
