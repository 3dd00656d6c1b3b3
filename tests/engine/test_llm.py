"""The offline engine and its asynchronous twin, with text, on the micro model."""

import asyncio
import dataclasses
import threading

import numpy as np
import pytest

from k3jax.chat.tokenizer import shipped_tokenizer
from k3jax.engine import engine as engine_module
from k3jax.engine.async_engine import AsyncEngine
from k3jax.engine.config import EngineConfig
from k3jax.engine.engine import Engine
from k3jax.engine.inputs import GenerationDefaults, Inputs
from k3jax.engine.llm import LLM
from k3jax.engine.request import RequestOptions, SamplingParams
from k3jax.errors import EngineClosedError, EngineError, RequestError
from k3jax.generation import generate
from tests.engine.running import CONFIG, SIZES, SharedRunner, model

TINY = shipped_tokenizer()
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Runner", SharedRunner)
        yield LLM(model(), tokenizer=TINY, **SIZES)


def oracle(prompt: list[int], count: int) -> list[int]:
    tokens = generate(
        model(), [prompt], max_new_tokens=count, stop_token_ids=tuple(TINY.stop_token_ids)
    )
    return [int(token) for token in tokens.token_ids[0] if token >= 0]


def test_prompts_of_every_kind(llm):
    ids = TINY.encode("Hello there")
    expected = oracle(ids, 8)
    forms = [
        "Hello there",
        ids,
        ["Hello there", "Hello there"],
        [ids, tuple(ids), np.asarray(ids), "Hello there"],
        np.asarray(ids),
        {"prompt_token_ids": ids},
        [{"prompt": "Hello there"}],
    ]
    for form in forms:
        for output in llm.generate(form, GREEDY):
            assert output.outputs[0].token_ids == expected
            assert output.outputs[0].text == TINY.decode(expected, skip_special_tokens=True)
            assert output.prompt_token_ids == ids and output.finished
            assert output.outputs[0].finish_reason in ("stop", "length")


def test_outputs_have_vllms_fields(llm):
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("Once upon", params)
    (one,) = output.outputs
    assert (output.prompt, one.index, one.stop_reason) == ("Once upon", 0, None)
    assert len(one.logprobs) == len(one.token_ids)
    for token_id, at in zip(one.token_ids, one.logprobs, strict=True):
        assert next(iter(at)) == token_id and at[token_id].rank == 1 and len(at) in (2, 3)
        assert at[token_id].decoded_token == TINY.decode([token_id])
    total = sum(
        at[token_id].logprob for token_id, at in zip(one.token_ids, one.logprobs, strict=True)
    )
    assert one.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, at in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert next(iter(at)) == token_id


def test_zero_logprobs_are_not_none(llm):
    """F072."""
    for count, expected in ((None, None), (0, 1), (1, 1)):
        params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=count)
        (output,) = llm.generate("a", params)
        found = output.outputs[0].logprobs
        assert (found is None) if expected is None else len(found[0]) == expected


def test_several_outputs(llm):
    """F070: each with its own draws, and the first what n = 1 gives."""
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("Hello", params)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    tokens = [tuple(one.token_ids) for one in output.outputs]
    assert len(set(tokens)) == 4
    (alone,) = llm.generate("Hello", dataclasses.replace(params, n=1))
    assert tuple(alone.outputs[0].token_ids) == tokens[0]
    (again,) = llm.generate("Hello", params)
    assert [tuple(one.token_ids) for one in again.outputs] == tokens
    free = [llm.generate("Hello", dataclasses.replace(params, n=1, seed=None)) for _ in range(2)]
    assert free[0][0].outputs[0].token_ids != free[1][0].outputs[0].token_ids


@pytest.mark.parametrize("shows", [False, True])
def test_stop_strings(llm, shows):
    """Found in the text, wherever token and step boundaries lie; nothing behind them counts."""
    (whole,) = llm.generate("Stop", dataclasses.replace(GREEDY, max_tokens=40, ignore_eos=True))
    text = whole.outputs[0].text
    assert len(text) > 8
    for start, length in ((3, 2), (5, 1), (4, 4)):
        stop = text[start : start + length]
        params = dataclasses.replace(
            GREEDY, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=shows
        )
        (output,) = llm.generate("Stop", params)
        (one,) = output.outputs
        place = text.index(stop)
        assert one.text == text[: place + length * shows]
        assert (one.finish_reason, one.stop_reason) == ("stop", stop)
        assert one.token_ids == whole.outputs[0].token_ids[: len(one.token_ids)]
    # What was computed behind the end is not taken for the answer: the next turn is right.
    follow = [*whole.prompt_token_ids, *one.token_ids, *TINY.encode(" more")]
    (turn,) = llm.generate([follow], GREEDY)
    assert turn.outputs[0].token_ids == oracle(follow, 8)


def test_stop_tokens_and_bad_words(llm):
    (whole,) = llm.generate("Stop", dataclasses.replace(GREEDY, max_tokens=20, ignore_eos=True))
    tokens = whole.outputs[0].token_ids
    stop = tokens[5]
    params = dataclasses.replace(GREEDY, max_tokens=20, stop_token_ids=(stop,))
    (output,) = llm.generate("Stop", params)
    assert output.outputs[0].token_ids == tokens[: tokens.index(stop) + 1]
    assert output.outputs[0].stop_reason == stop
    word = TINY.decode([tokens[0]])
    params = dataclasses.replace(GREEDY, bad_words=[word])
    (output,) = llm.generate("Stop", params)
    assert tokens[0] not in output.outputs[0].token_ids


def test_chat(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, dataclasses.replace(GREEDY, max_tokens=16))
    assert output.outputs[0].message is not None
    assert output.outputs[0].text == (output.outputs[0].message.content or "")
    two = llm.chat([messages, messages], dataclasses.replace(GREEDY, max_tokens=16))
    assert [one.outputs[0].token_ids for one in two] == [output.outputs[0].token_ids] * 2
    # The second conversation found the first one's prompt.
    assert output.num_cached_tokens is not None


@pytest.mark.parametrize(
    "prompts, params, field",
    [
        ("", GREEDY, "prompt"),
        ([], GREEDY, "prompt"),
        ([[]], GREEDY, "prompt"),
        ([[1, CONFIG.vocab_size]], GREEDY, "prompt"),
        ([[1.5]], GREEDY, "prompt"),
        ([["a"]], GREEDY, "prompt"),
        (5, GREEDY, "prompt"),
        ("x" * 100_000, GREEDY, "prompt"),
        (["a", "b"], [GREEDY], "sampling_params"),
        ("a", dataclasses.replace(GREEDY, max_tokens=10_000), "max_tokens"),
        ("a", dataclasses.replace(GREEDY, logprobs=21), "logprobs"),
    ],
)
def test_bad_input(llm, prompts, params, field):
    """Refused as a whole before anything is computed."""
    steps = llm.engine.scheduler.stats.steps
    with pytest.raises(RequestError) as refusal:
        llm.generate(prompts, params)
    assert refusal.value.field == field
    assert llm.engine.scheduler.stats.steps == steps and not llm.engine.has_work


def test_a_bad_prompt_among_good_ones(llm):
    with pytest.raises(RequestError):
        llm.generate(["good", [10**6]], GREEDY)
    assert not llm.engine.has_work
    assert len(llm.generate("good", GREEDY)) == 1


def test_an_interrupt_leaves_an_idle_engine(llm, monkeypatch):
    steps = iter(range(3))
    step = llm.engine.step

    def interrupted():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two", "three"], dataclasses.replace(GREEDY, max_tokens=60))
    monkeypatch.undo()
    assert not llm.engine.scheduler.has_work
    ids = TINY.encode("one")
    assert llm.generate("one", GREEDY)[0].outputs[0].token_ids == oracle(ids, 8)


def test_progress_bar(llm, capsys):
    llm.generate(["a"] * 3, SamplingParams(max_tokens=1))
    assert capsys.readouterr().err == ""
    llm.generate(["a"] * 9, SamplingParams(max_tokens=1))
    assert "9/9" in capsys.readouterr().err
    llm.generate(["a"] * 9, SamplingParams(max_tokens=1), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_closing(monkeypatch):
    monkeypatch.setattr(engine_module, "Runner", SharedRunner)
    llm = LLM(model(), **SIZES)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].text == ""
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate([[1, 2]], GREEDY)


# The asynchronous twin.


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Runner", SharedRunner)
        engine = AsyncEngine(lambda: Engine(model(), EngineConfig(**SIZES)))
        engine.start()
        yield engine
        engine.close()


INPUTS = Inputs(TINY, GenerationDefaults(), CONFIG.vocab_size, 384)


async def collect(engine: AsyncEngine, text: str, params: SamplingParams, **options):
    (output,) = INPUTS.outputs(INPUTS.prompt(text), params)
    steps = [step async for step in engine.stream([output], RequestOptions(**options))]
    assert [t for step in steps for t in step.token_ids] == output.token_ids
    return output, steps


def test_streams_of_many_requests(served):
    async def main():
        texts = [f"Number {number}" for number in range(10)]
        params = dataclasses.replace(GREEDY, max_tokens=20)
        found = await asyncio.gather(*(collect(served, text, params) for text in texts))
        for text, (output, steps) in zip(texts, found, strict=True):
            assert output.token_ids == oracle(TINY.encode(text), 20)
            assert steps[0].is_first and steps[-1].finish_reason is not None
            assert "".join(step.delta.content for step in steps) == output.text

    asyncio.run(main())


def test_leaving_a_stream_cancels(served):
    async def main():
        params = dataclasses.replace(GREEDY, max_tokens=300, ignore_eos=True)
        (output,) = INPUTS.outputs(INPUTS.prompt("Leave"), params)
        stream = served.stream([output])
        async for _ in stream:
            break
        await stream.aclose()
        for _ in range(200):
            if output.finish_reason is not None:
                break
            await asyncio.sleep(0.01)
        assert output.finish_reason == "abort"
        usage = await served.call(lambda engine: engine.cache.usage())
        assert usage["slots"].referenced == 0

    asyncio.run(main())


def test_refusals_and_calls(served):
    async def main():
        params = dataclasses.replace(GREEDY, logprobs=99)
        (output,) = INPUTS.outputs(INPUTS.prompt("x"), params)
        with pytest.raises(RequestError) as refusal:
            served.submit([output])
        assert refusal.value.field == "logprobs"
        assert await served.call(lambda engine: threading.current_thread().name) == "k3jax-engine"
        with pytest.raises(ZeroDivisionError):
            await served.call(lambda engine: 1 / 0)

    asyncio.run(main())


def test_an_engine_that_fails_ends_its_streams(monkeypatch):
    monkeypatch.setattr(engine_module, "Runner", SharedRunner)
    engine = AsyncEngine(lambda: Engine(model(), EngineConfig(**SIZES)))
    engine.start()

    async def main():
        def broken():
            raise RuntimeError("a fault in the scheduler")

        await engine.call(lambda inner: setattr(inner, "step", broken))
        with pytest.raises(EngineError, match="fault in the scheduler"):
            await collect(engine, "x", GREEDY)
        assert not engine.ready
        with pytest.raises(EngineClosedError):
            await engine.call(lambda inner: None)
        with pytest.raises(EngineClosedError):
            await collect(engine, "x", GREEDY)

    asyncio.run(main())


def test_loading_errors_reach_the_caller():
    def load():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        AsyncEngine(load).start()


def test_closing_while_requests_run(monkeypatch):
    monkeypatch.setattr(engine_module, "Runner", SharedRunner)
    engine = AsyncEngine(lambda: Engine(model(), EngineConfig(**SIZES)))
    engine.start()

    async def main():
        params = dataclasses.replace(GREEDY, max_tokens=300, ignore_eos=True)
        (output,) = INPUTS.outputs(INPUTS.prompt("x"), params)
        stream = engine.submit([output])
        await stream.next()
        await asyncio.get_running_loop().run_in_executor(None, engine.close)
        with pytest.raises(EngineClosedError):
            while await stream.next() is not None:
                pass
        assert not engine.alive

    asyncio.run(main())
