"""An engine in a thread of its own, and streams of its steps for an asyncio loop.

The loop only ever waits for a queue, so a server answers while the model runs. Commands (add,
abort, and anything else that touches the engine) wait in an inbox that the thread empties between
two steps. Imports no jax itself.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from k3jax.engine.output import Output, OutputStep
from k3jax.errors import EngineClosedError, EngineError

logger = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What the thread needs of `k3jax.engine.engine.Engine`."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    def prepare(self, output: Output, options: Any = ...) -> Any:
        """A request, checked. Any thread may call it."""

    def add(self, request: Any, listener: Callable[[OutputStep], None]) -> None:
        """Queues a prepared request."""

    def abort(self, request: Any, reason: str = ...) -> None:
        """Ends a request in any state."""

    def step(self) -> None:
        """One turn."""

    @property
    def has_work(self) -> bool:
        """Turns are needed."""

    @property
    def num_waiting(self) -> int:
        """Requests that have no memory yet."""

    @property
    def num_free_rows(self) -> int:
        """So many more requests may run beside those that do."""


class Stream:
    """The steps of the outputs of one request, in the event loop that made it."""

    def __init__(self, outputs: Sequence[Output], requests: Sequence[Any]):
        self.outputs = outputs
        self.disconnected = False  # the client is gone
        self._requests = requests
        self._left = len(requests)
        self._has_started = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[OutputStep | BaseException | None] = asyncio.Queue()

    async def next(self, timeout_s: float | None = None) -> OutputStep | None:
        """The next step, None behind the last one. Raises what ended the stream early, and
        `TimeoutError` when nothing came in time."""
        event = await asyncio.wait_for(self._events.get(), timeout_s)
        if isinstance(event, BaseException):
            raise event
        return event

    def _post(self, event: OutputStep | BaseException | None) -> None:
        """Hands an event to the request, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _on_step(self, step: OutputStep) -> None:
        """Called in the engine's thread."""
        self._has_started = True
        self._post(step)
        if step.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self._post(None)


class AsyncEngine:
    """Loads an engine in a thread, drives it there, and takes requests from an event loop."""

    def __init__(self, load: Callable[[], EngineLike]):
        self._load = load
        self._engine: EngineLike | None = None
        self._failure: BaseException | None = None
        self._loaded = threading.Event()
        self._changed = threading.Condition()  # guards what follows
        self._inbox: deque[Callable[[EngineLike], None]] = deque()
        self._num_arriving = 0  # requests in the inbox
        self._streams: set[Stream] = set()
        self._calls: set[Callable[[BaseException], None]] = set()  # that wait: how to fail each
        self._draining = False
        self._closed = False
        # A daemon, so that an interrupt while the model loads ends the process.
        self._thread = threading.Thread(target=self._main, name="k3jax-engine", daemon=True)

    @classmethod
    def from_pretrained(cls, path, *, mesh=None, **engine_args: Any) -> "AsyncEngine":
        """An engine for a checkpoint folder, ready to serve. engine_args: fields of
        `EngineConfig`."""
        from k3jax.engine.config import EngineConfig
        from k3jax.engine.engine import Engine

        config = EngineConfig(**engine_args)
        engine = cls(lambda: Engine.from_pretrained(path, config, mesh=mesh))
        engine.start()
        return engine

    # Life.

    def start(self) -> None:
        """Loads the model and returns when it can serve; raises what went wrong."""
        self._thread.start()
        while not self._loaded.wait(timeout=0.2):  # in slices, so that signals are handled
            pass
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Takes no more requests and gives up those that have nothing yet; others may end."""
        with self._changed:
            self._draining = True
            waiting = [stream for stream in self._streams if not stream._has_started]
        for stream in waiting:
            stream._post(EngineClosedError("the engine is shutting down"))
            self.cancel(stream)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends everything; what runs is given up."""
        self.drain()
        with self._changed:
            self._closed = True
            for stream in self._streams:
                stream._post(EngineClosedError("the engine is shutting down"))
            self._changed.notify()
        if self._thread.is_alive():
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
    def engine(self) -> EngineLike:
        """The loaded engine. Other threads read what never changes, and call `prepare`."""
        assert self._engine is not None, "start() has not returned"
        return self._engine

    @property
    def num_waiting(self) -> int:
        """Outputs that wait for others to end; those for which a row is free do not."""
        engine = self.engine
        return max(0, self._num_arriving + engine.num_waiting - engine.num_free_rows)

    # Requests.

    def submit(self, outputs: Sequence[Output], options: Any = None) -> Stream:
        """Starts the outputs of one request; `RequestError` refuses all of them."""
        more = () if options is None else (options,)
        return self.submit_prepared(
            outputs, [self.engine.prepare(output, *more) for output in outputs]
        )

    def submit_prepared(self, outputs: Sequence[Output], requests: Sequence[Any]) -> Stream:
        """The same with what `engine.prepare` made of each output, in another thread perhaps."""
        stream = Stream(outputs, requests)

        def add(engine: EngineLike) -> None:
            for request in requests:
                engine.add(request, stream._on_step)

        with self._changed:
            if not self.ready:
                raise EngineClosedError("the engine is shutting down")
            self._streams.add(stream)
            self._num_arriving += len(requests)
            self._inbox.append(add)
            self._changed.notify()
        return stream

    def cancel(self, stream: Stream) -> None:
        """Gives a request up, in any state; to be called for complete ones as well."""

        def abort(engine: EngineLike) -> None:
            for request in stream._requests:
                engine.abort(request)
            stream._post(None)

        with self._changed:
            is_mine = stream in self._streams
            self._streams.discard(stream)
            if is_mine and stream._left:
                self._inbox.append(abort)
                self._changed.notify()

    async def stream(self, outputs: Sequence[Output], options: Any = None) -> AsyncIterator:
        """The steps of a request's outputs; leaving the loop cancels it."""
        stream = self.submit(outputs, options)
        try:
            while (step := await stream.next()) is not None:
                yield step
        finally:
            self.cancel(stream)

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """What `function(engine)` returns, called between two steps: for `update_weights` and
        the like."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future = loop.create_future()

        def set_result(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)

        def tell(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(set_result, result, error)

        def give_up(error: BaseException) -> None:
            tell(None, error)

        def run(engine: EngineLike) -> None:
            result, error = None, None
            try:
                result = function(engine)
            except Exception as problem:
                error = problem
            tell(result, error)

        with self._changed:
            if self._closed or not self.alive:
                raise EngineClosedError("the engine has ended")
            self._calls.add(give_up)
            self._inbox.append(run)
            self._changed.notify()
        try:
            return await answer
        finally:
            self._calls.discard(give_up)

    # The thread.

    def _main(self) -> None:
        try:
            self._engine = self._load()
        except BaseException as failure:
            self._failure = failure
            return
        finally:
            self._loaded.set()
        ended: EngineError = EngineClosedError("the engine has ended")
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._engine.step()
        except Exception as error:
            logger.exception("the engine has failed")
            ended = EngineError(f"the engine has failed: {error}")
        with self._changed:
            self._closed = self._draining = True
            for stream in self._streams:
                stream._post(ended)
            for give_up in list(self._calls):
                give_up(ended)

    def _take_commands(self) -> bool:
        """Runs what came in, and waits for it while there is nothing to compute."""
        assert self._engine is not None
        with self._changed:
            while not self._inbox and not self._closed and not self._engine.has_work:
                self._changed.wait()
            if self._closed:
                return False
            inbox, self._inbox = self._inbox, deque()
            self._num_arriving = 0
        for command in inbox:
            command(self._engine)
        return True
