"""Fields of requests: what of them reaches the engine, and what answers say because of them."""

import math

import pytest

from k3jax.chat.tokenizer import Detokenizer
from k3jax.engine.request import SamplingParams
from k3jax.serve.logprobs import CompletionLogprobs
from tests.serve.scripted import TINY, ScriptedEngine, ids_of, logprobs_of, serving
from tests.serve.test_app import ANSWER, CHAT, COMPLETIONS, USER

END = TINY.special_ids["<|end_of_msg|>"]


def concatenated(chunks: list[dict]) -> list[dict]:
    """The choices that the chunks of a stream of completions add up to."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] not in choices:
                choices[part["index"]] = dict(part)
                continue
            choice = choices[part["index"]]
            choice["text"] += part["text"]
            for name in ("finish_reason", "stop_reason"):
                choice[name] = part[name]
            if part["logprobs"] is not None:
                for name, values in part["logprobs"].items():
                    choice["logprobs"][name] = choice["logprobs"][name] + values
            if "token_ids" in part:
                choice["token_ids"] = choice["token_ids"] + part["token_ids"]
    return [choices[index] for index in sorted(choices)]


# ---- to the engine

REACHES = {
    "n": 3,
    "max_tokens": 30,
    "min_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": -1.5,
    "frequency_penalty": 2,
    "repetition_penalty": 1.25,
    "logit_bias": {"5": -100, "7": 2.5},
    "allowed_token_ids": [5, 7, 9],
    "bad_words": ["no", "never"],
    "seed": -4,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "prompt_logprobs": 0,
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_sampling_parameters_reach_the_engine(plain, path):
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [USER]}
    assert plain.post(path, body | REACHES).status_code == 200
    expected = SamplingParams(**REACHES)
    assert plain.engine.params[-3:] == [expected.for_output(index) for index in range(3)]


def test_fields_of_one_endpoint(plain):
    plain.complete(logprobs=0, include_stop_str_in_output=True)
    assert plain.engine.params[-1].logprobs == 0
    assert plain.engine.params[-1].include_stop_str_in_output
    plain.chat(logprobs=True, top_logprobs=2, max_tokens=99, max_completion_tokens=5)
    assert (plain.engine.params[-1].logprobs, plain.engine.params[-1].max_tokens) == (2, 5)
    plain.chat(logprobs=False)
    assert plain.engine.params[-1].logprobs is None


def test_options_reach_the_engine(plain):
    plain.complete(priority=-2, cache_salt="mine")
    options = plain.engine.options[-1]
    assert (options.priority, options.cache_salt) == (-2, "mine")
    plain.chat(priority=0)
    assert (plain.engine.options[-1].priority, plain.engine.options[-1].cache_salt) == (0, None)
    plain.complete(priority=None, cache_salt=None)
    assert plain.engine.options[-1] is None


def test_bad_words_are_ids_for_the_engine(scripted, monkeypatch):
    prepared = []
    prepare = ScriptedEngine.prepare
    monkeypatch.setattr(
        ScriptedEngine,
        "prepare",
        lambda self, output, *more: prepared.append(output) or prepare(self, output, *more),
    )
    scripted.complete(bad_words=["no"])
    assert prepared[-1].bad_word_ids == (tuple(TINY.encode("no")), tuple(TINY.encode(" no")))


# ---- several answers


@pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"]])
def test_several_completions(scripted, prompt):
    fields = {"prompt": prompt, "n": 3, "max_tokens": 4, "return_token_ids": True}
    prompts = [prompt] if isinstance(prompt, str) else prompt
    whole = scripted.complete(**fields).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(3 * len(prompts)))
    for index, choice in enumerate(whole["choices"]):
        assert choice["text"] == chr(ord("x") + index) * 4
        assert choice["prompt_token_ids"] == TINY.encode(prompts[index // 3])
    assert whole["usage"]["prompt_tokens"] == sum(len(TINY.encode(text)) for text in prompts)
    assert whole["usage"]["completion_tokens"] == 12 * len(prompts)
    options = {"include_usage": True}
    chunks = scripted.events(COMPLETIONS, fields | {"stream_options": options})
    assert concatenated(chunks) == whole["choices"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert scripted.engine.most_running == 3 * len(prompts)


def test_several_chats(scripted):
    scripted.engine.answer = ANSWER[:-1]
    fields = {"n": 2, "ignore_eos": True, "max_tokens": len(ANSWER) + 3}
    whole = scripted.chat(**fields).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    chunks = scripted.events(CHAT, {"messages": [USER], **fields, "return_token_ids": True})
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        content = "".join(c["delta"].get("content", "") for c in own)
        assert content == choice["message"]["content"] == "One END two 漢"
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]


def test_too_many_answers(plain):
    refused = plain.complete(prompt=["x"] * 100, n=3)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "n"
    assert plain.complete(prompt="x", n=128, max_tokens=1).status_code == 200


def test_cached_tokens_count_once_for_each_prompt():
    with serving(ScriptedEngine(num_cached_tokens=64)) as running:
        usage = running.complete(prompt=["a", "b"], n=3, max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 128}
        assert usage["prompt_tokens"] == 2
        usage = running.chat(max_tokens=1, n=2).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 64}


# ---- text


@pytest.mark.parametrize("step", [1, 3, 50])
def test_stop_strings_in_the_output(scripted, step):
    scripted.engine.answer, scripted.engine.step_tokens = ids_of("one two three four"), step
    fields = {"stop": ["three"], "include_stop_str_in_output": True, "max_tokens": 99}
    (choice,) = scripted.complete(**fields).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("one two three", "three")
    chunks = scripted.events(COMPLETIONS, {"prompt": "hi", **fields})
    assert concatenated(chunks) == [choice]


def test_no_stop_string_counts_before_min_tokens(scripted):
    scripted.engine.answer = list(b"a.b.c.")
    fields = {"stop": ".", "max_tokens": 6}
    assert scripted.complete(**fields).json()["choices"][0]["text"] == "a"
    choice = scripted.complete(**fields, min_tokens=3).json()["choices"][0]
    assert choice["text"] == "a.b"


# ---- logprobs of completions


def test_logprobs_of_a_completion(scripted):
    scripted.engine.answer = [*"hé".encode(), END]
    (choice,) = scripted.complete(logprobs=3).json()["choices"]
    assert choice["text"] == "hé"
    assert choice["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "<|end_of_msg|>"],
        "token_logprobs": [-1.0] * 4,
        "top_logprobs": [
            {"h": -1.0, "A": -0.5, "B": -9999.0},
            {"bytes:\\xc3": -1.0, "A": -0.5, "B": -9999.0},
            {"bytes:\\xa9": -1.0, "A": -0.5, "B": -9999.0},
            {"<|end_of_msg|>": -1.0, "A": -0.5, "B": -9999.0},
        ],
        "text_offset": [0, 1, 1, 2],
    }


@pytest.mark.parametrize("count, told", [(0, {"x"}), (1, {"x", "A"}), (2, {"x", "A"})])
def test_zero_logprobs_are_not_none(scripted, count, told):
    (choice,) = scripted.complete(logprobs=count, max_tokens=1).json()["choices"]
    assert set(choice["logprobs"]["top_logprobs"][0]) == told
    for absent in ({}, {"logprobs": None}):
        assert scripted.complete(**absent).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("step", [1, 2, 50])
@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 2},
        {"logprobs": 0, "return_token_ids": True, "n": 2},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0, "prompt": ["a b", "c"]},
        {"logprobs": 1, "stop": "tw"},
        {"skip_special_tokens": False, "logprobs": 1},
    ],
    ids=str,
)
def test_streamed_completions_tell_the_same(scripted, fields, step):
    scripted.engine.step_tokens = step
    scripted.engine.answer = ids_of("漢👍 one⟦media_pad⟧ two⟦end_of_msg⟧")
    body = {"prompt": "hi"} | fields
    whole = scripted.complete(**body).json()["choices"]
    assert concatenated(scripted.events(COMPLETIONS, body)) == whole


def test_offsets_are_places_in_the_text():
    ids = ids_of("漢👍é⟦media_pad⟧ one⟦sep⟧x")
    text = TINY.decode(ids, skip_special_tokens=True)
    told = CompletionLogprobs(TINY, skip_special_tokens=True).feed([logprobs_of(i, 0) for i in ids])
    reader, shown = Detokenizer(TINY), ""
    for token_id, name, offset in zip(ids, told["tokens"], told["text_offset"], strict=True):
        assert offset == len(shown)
        if token_id < TINY.n_base and not name.startswith("bytes:"):
            assert text[offset:].startswith(name)
        shown += reader.feed((token_id,))


def test_tokens_without_a_tokenizer():
    with serving(ScriptedEngine(answer=[5, 6]), tokenizer=None) as running:
        fields = {"prompt": [1, 2], "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0}
        (choice,) = running.complete(**fields).json()["choices"]
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]
        assert choice["logprobs"]["text_offset"] == [0, 0]
        assert choice["prompt_logprobs"][1]["2"]["decoded_token"] == "token_id:2"
        refused = running.complete(prompt=[1], bad_words=["x"])
        assert refused.json()["error"]["param"] == "bad_words"


# ---- logprobs of chats and prompts


@pytest.mark.parametrize("step", [1, 3, 50])
@pytest.mark.parametrize("count", [None, 0, 2])
def test_logprobs_of_a_chat(scripted, count, step):
    scripted.engine.answer, scripted.engine.step_tokens = ANSWER, step
    fields = {"logprobs": True} | ({} if count is None else {"top_logprobs": count})
    (choice,) = scripted.chat(**fields).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content] == [TINY.token_bytes(i) for i in ANSWER]
    assert {entry["logprob"] for entry in content} == {-1.0}
    assert {len(entry["top_logprobs"]) for entry in content} == {count or 0}
    if count:
        assert content[0]["top_logprobs"][0] == {"token": "A", "logprob": -0.5, "bytes": [65]}
    chunks = scripted.events(CHAT, {"messages": [USER], **fields})
    streamed = [
        entry
        for chunk in chunks
        for part in chunk["choices"]
        if part["logprobs"] is not None
        for entry in part["logprobs"]["content"]
    ]
    assert streamed == content
    assert scripted.chat().json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_prompt_logprobs(scripted, count):
    (choice,) = scripted.complete(prompt="abc", prompt_logprobs=count).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(told)) for told in others] == [str(i) for i in b"bc"]
    assert others[0]["98"] == {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
    assert all(math.isfinite(value["logprob"]) for told in others for value in told.values())
    if count:
        assert others[0]["65"] == {"logprob": -0.5, "rank": 1, "decoded_token": "A"}
    assert "prompt_logprobs" not in scripted.complete().json()["choices"][0]


def test_prompt_logprobs_of_a_chat(scripted):
    whole = scripted.chat(prompt_logprobs=0, n=2, max_tokens=2).json()
    assert len(whole["prompt_logprobs"]) == len(scripted.engine.prompts[-1])
    chunks = scripted.events(
        CHAT, {"messages": [USER | {"content": "hi"}], "prompt_logprobs": 0, "max_tokens": 2}
    )
    told = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert told == [whole["prompt_logprobs"]]
