"""`AsyncEngine.call`, which trainers use between two steps."""

import asyncio
import threading

import pytest

from k3jax.engine.async_engine import AsyncEngine
from k3jax.engine.inputs import GenerationDefaults, Inputs
from k3jax.engine.request import SamplingParams
from k3jax.errors import EngineClosedError, EngineError
from tests.serve.scripted import TINY, ScriptedEngine


def started(engine: ScriptedEngine) -> AsyncEngine:
    async_engine = AsyncEngine(lambda: engine)
    async_engine.start()
    return async_engine


def test_a_call_returns_or_raises_what_the_function_does():
    engine = started(ScriptedEngine())

    async def calls() -> int:
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda _: 1 // 0)
        return await engine.call(lambda scripted: scripted.vocab_size)

    assert asyncio.run(calls()) == TINY.vocab_size
    engine.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(calls())


def test_a_call_is_told_when_the_engine_fails():
    engine = started(ScriptedEngine(step_s=0.1, die_after=0))
    inputs = Inputs(TINY, GenerationDefaults(), TINY.vocab_size, 100)

    async def call() -> None:
        engine.submit(inputs.outputs([1], SamplingParams()))
        await asyncio.sleep(0.05)  # the step that fails is under way
        with pytest.raises(EngineError):
            await asyncio.wait_for(engine.call(lambda _: None), 5)

    asyncio.run(call())


def test_a_loop_that_closes_during_a_call_does_not_end_the_engine():
    engine = started(ScriptedEngine())
    is_called, may_return = threading.Event(), threading.Event()

    def wait(_: ScriptedEngine) -> None:
        is_called.set()
        may_return.wait(5)

    async def leave() -> None:
        task = asyncio.create_task(engine.call(wait))
        await asyncio.to_thread(is_called.wait, 5)
        task.cancel()

    asyncio.run(leave())
    may_return.set()

    async def call() -> str:
        return await asyncio.wait_for(engine.call(lambda _: "still here"), 5)

    assert asyncio.run(call()) == "still here"
    engine.close()
