"""`python scripts/serve.py` with the model it serves by default, seen by the openai client."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
READY_S = 240.0  # on a machine busy with other tests, with the checkpoint still to be written
MESSAGES = [{"role": "user", "content": "Say hi to <|open|> Zoë 漢字."}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where the server listens, once it is ready."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "scripts/serve.py", "--port", "0"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    log, found = [], None
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            break
    timer.cancel()
    reader = threading.Thread(target=lambda: log.extend(process.stderr))
    reader.start()
    try:
        assert found is not None, "".join(log)
        assert httpx.get(f"{found[1]}/ready").status_code == 200
        assert any("UNTRAINED" in line for line in log)
        yield found[1]
        assert process.poll() is None, "the server has ended:\n" + "".join(log)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        reader.join(10)
    assert not any("Traceback" in line for line in log), "".join(log)


@pytest.fixture
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(client) -> str:
    return client.models.list().data[0].id


def test_models(client, model):
    card = client.models.retrieve(model)
    assert "UNTRAINED" in card.description
    assert card.max_model_len > 0


def test_chat(client, model):
    def ask():
        return client.chat.completions.create(
            model=model, messages=MESSAGES, max_completion_tokens=24, temperature=0
        )

    response = ask()
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("length", "stop")
    assert choice.message.reasoning_content or choice.message.content
    assert response.usage.completion_tokens <= 24
    total = response.usage.prompt_tokens + response.usage.completion_tokens
    assert response.usage.total_tokens == total
    assert ask().choices == response.choices


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_chat_stream_equals_whole(client, model, thinking):
    fields = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 32,
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 11,
        "extra_body": {"thinking": {"type": thinking}, "top_k": 50},
    }
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    message = whole.choices[0].message
    assert (content or None, reasoning or None) == (message.content, message.reasoning_content)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
    for name in counts:  # what is cached differs the second time
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)
    finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in finish if reason] == [whole.choices[0].finish_reason]


@pytest.mark.parametrize("prompt", ["Once", ["Once", "Twice"], [10, 11], [[10], [11, 12]]])
def test_completion_stream_equals_whole(client, model, prompt):
    fields = {"model": model, "prompt": prompt, "max_tokens": 9, "seed": 3}
    whole = client.completions.create(**fields)
    texts = [""] * len(whole.choices)
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert all(choice.finish_reason in ("length", "stop") for choice in whole.choices)


def test_several_answers_with_logprobs(client, model):
    fields = {"model": model, "prompt": ["Once", "Twice"], "n": 2, "max_tokens": 6, "seed": 5}
    response = client.completions.create(**fields, logprobs=2)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.usage.completion_tokens <= 24
    for choice in response.choices:
        told = choice.logprobs
        assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) <= 6
        assert all(value <= 0 for value in told.token_logprobs)
        assert all(2 <= len(top) <= 3 for top in told.top_logprobs)
    alone = client.completions.create(**(fields | {"prompt": "Once", "n": 1}))
    assert alone.choices[0].text == response.choices[0].text


def test_logprobs_of_a_chat(client, model):
    fields = {"model": model, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    fields |= {"logprobs": True, "top_logprobs": 2}
    (choice,) = client.chat.completions.create(**fields).choices
    for entry in choice.logprobs.content:
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    chunks = client.chat.completions.create(**fields, stream=True)
    parts = [part for chunk in chunks for part in chunk.choices if part.logprobs]
    streamed = [entry for part in parts for entry in part.logprobs.content]
    assert [entry.token for entry in streamed] == [one.token for one in choice.logprobs.content]


def test_prompt_logprobs_and_cached_tokens(client, model):
    prompt = "It was a dark and stormy night. " * 20
    fields = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}

    def ask(**extra):
        return client.completions.create(**fields, extra_body=extra)

    first = ask(cache_salt="first").usage
    assert first.prompt_tokens_details.cached_tokens == 0
    again = ask(cache_salt="first").usage
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens
    assert ask(cache_salt="second").usage.prompt_tokens_details.cached_tokens == 0
    told = ask(cache_salt="first", prompt_logprobs=1)  # F072: complete though it is cached
    assert len(told.choices[0].prompt_logprobs) == told.usage.prompt_tokens


def test_parameters_that_decide_the_text(client, model):
    fields = {"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0}
    forced = client.completions.create(**fields, logit_bias={"65": 100})
    assert forced.choices[0].text == "AAAA"
    allowed = client.completions.create(**fields, extra_body={"allowed_token_ids": [66]})
    assert allowed.choices[0].text == "BBBB"
    varied = client.completions.create(
        **fields, frequency_penalty=2, extra_body={"allowed_token_ids": [65, 66, 67, 68]}
    )
    assert len(set(varied.choices[0].text)) > 1


def test_requests_run_at_once(client, model):
    def ask(seed: int) -> str:
        fields = {"model": model, "prompt": "Once", "max_tokens": 12, "seed": seed}
        return client.completions.create(**fields).choices[0].text

    with ThreadPoolExecutor(6) as pool:
        at_once = list(pool.map(ask, range(6)))
    assert at_once == [ask(seed) for seed in range(6)]


def test_stop_and_token_ids(client, model):
    extra = {"return_token_ids": True, "ignore_eos": True}
    fields = {"model": model, "prompt": "Once", "max_tokens": 20, "temperature": 0}
    free = client.completions.create(**fields, extra_body=extra).choices[0]
    assert len(free.token_ids) == 20
    ended = client.completions.create(
        **fields, extra_body=extra | {"stop_token_ids": [free.token_ids[6]]}
    ).choices[0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[6]) + 1]
    assert ended.finish_reason == "stop"


def test_sampling_without_a_seed_varies(client, model):
    fields = {"model": model, "prompt": "Once", "max_tokens": 12, "temperature": 1.0}
    assert len({client.completions.create(**fields).choices[0].text for _ in range(4)}) > 1


BAD = {
    "unknown_model": (openai.NotFoundError, {"model": "gpt-99"}, "model"),
    "no_messages": (openai.BadRequestError, {"messages": []}, "messages"),
    "negative_max_tokens": (openai.BadRequestError, {"max_tokens": -1}, "max_tokens"),
    "too_long": (
        openai.BadRequestError,
        {"messages": [{"role": "user", "content": "a b " * 200_000}]},
        "messages",
    ),
    "bad_temperature": (openai.BadRequestError, {"temperature": -3}, "temperature"),
    "tools": (
        openai.BadRequestError,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
    ),
}


@pytest.mark.parametrize("error, fields, param", BAD.values(), ids=BAD.keys())
def test_bad_input_is_named_and_the_server_goes_on(client, model, error, fields, param):
    good = {"model": model, "messages": MESSAGES, "max_tokens": 2}
    with pytest.raises(error) as refused:
        client.chat.completions.create(**(good | fields))
    assert refused.value.param == param
    assert client.chat.completions.create(**good).usage.completion_tokens >= 1


def test_invalid_json(url, client, model):
    response = httpx.post(f"{url}/v1/chat/completions", content=b"{not json")
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert client.completions.create(model=model, prompt="x", max_tokens=1).choices


def test_a_stream_that_is_closed_early_frees_the_model(client, model):
    for _ in range(3):
        stream = client.completions.create(
            model=model,
            prompt="Once",
            max_tokens=2_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    assert client.completions.create(model=model, prompt="x", max_tokens=1, timeout=20).choices
