"""The endpoints: answers, streams, refusals, and that the server goes on after each of them."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from k3jax.chat.tokenizer import load_tokenizer
from k3jax.engine.inputs import GenerationDefaults
from k3jax.serve import app, server
from k3jax.serve.limits import Limits
from tests.chat.vocabulary import write_tokenizer
from tests.serve.scripted import TINY, ScriptedEngine, ids_of, serving, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWER = ids_of(
    "Hm, END.⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧One END two 漢⟦close⟧response⟦sep⟧"
    "⟦close⟧message⟦sep⟧⟦end_of_msg⟧"
)


def joined_message(chunks: list[dict]) -> dict:
    """What a client makes of the chunks of a chat."""
    message = {"content": "", "reasoning_content": ""}
    finish = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            for key, value in choice["delta"].items():
                if key in message:
                    message[key] += value
            finish += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    assert len(finish) == 1
    return {key: value or None for key, value in message.items()} | {"finish_reason": finish[0]}


# ---- small endpoints


def test_state(plain):
    for path in ("/health", "/ready"):
        assert plain.client.get(path).status_code == 200
    assert isinstance(plain.client.get("/version").json()["version"], str)


def test_models(plain):
    models = plain.client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["scripted", "alias"]
    assert models["data"][0]["description"] == "A scripted model."
    assert models["data"][0]["max_model_len"] == 2_000
    assert plain.client.get("/v1/models/alias").json()["id"] == "alias"


def test_openapi_names_the_fields(plain):
    document = plain.client.get("/openapi.json").json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    assert {"messages", "temperature"} <= set(body["schema"]["properties"])
    assert "$ref" not in json.dumps(body)


# ---- chat


def test_chat(plain):
    response = plain.chat(model="alias", temperature=0).json()
    assert response["object"] == "chat.completion"
    assert response["model"] == "alias"
    (choice,) = response["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "It is 4, 漢字 👍."
    assert choice["message"]["reasoning_content"] == "Two and two."
    assert choice["message"]["reasoning"] == "Two and two."
    assert "tool_calls" not in choice["message"]
    usage = response["usage"]
    assert usage["prompt_tokens"] == len(plain.engine.prompts[-1])
    assert usage["completion_tokens"] == len(plain.engine.answer)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning_tokens == len(TINY.encode("Two and two."))


def test_chat_prompt_is_rendered(plain):
    plain.chat(messages=[{"role": "user", "content": "<|end_of_msg|>"}], reasoning_effort="low")
    prompt = plain.engine.prompts[-1]
    text = TINY.decode(prompt)
    assert "thinking_effort=low" in text and text.endswith("<|open|>think<|sep|>")
    assert prompt.count(TINY.special_ids["<|end_of_msg|>"]) == 2


def test_chat_stream(plain):
    chunks = plain.events(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert "usage" not in chunks[-1]
    message = joined_message(chunks)
    assert message["content"] == "It is 4, 漢字 👍."
    assert message["reasoning_content"] == "Two and two."
    assert message["finish_reason"] == "stop"


@pytest.mark.parametrize("step", [1, 2, 7, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": "END"},
        {"stop": ["nothing", "END t"]},
        {"max_tokens": 5},
        {"max_completion_tokens": 32, "max_tokens": 2},
        {"thinking": {"type": "disabled"}, "max_tokens": 60},
        {"ignore_eos": True, "max_tokens": 90},
        {"skip_special_tokens": False},
        {"skip_special_tokens": True},
        {"stop_token_ids": [TINY.encode("O")[0]]},
    ],
    ids=lambda fields: "-".join(fields) or "default",
)
def test_a_stream_says_the_same_as_the_whole(scripted, fields, step):
    scripted.engine.answer, scripted.engine.step_tokens = ANSWER, step
    whole = scripted.chat(**fields).json()
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    chunks = scripted.events(CHAT, body | {"stream_options": {"include_usage": True}})
    message = whole["choices"][0]["message"]
    expected = {key: message[key] for key in ("content", "reasoning_content")}
    expected["finish_reason"] = whole["choices"][0]["finish_reason"]
    assert joined_message(chunks[:-1]) == expected
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_split_into_channels_does_not_depend_on_options(scripted):
    """Whatever ends the generation, the terminator is in no text."""
    scripted.engine.answer = ANSWER
    for fields in ({}, {"ignore_eos": True, "max_tokens": 80}, {"skip_special_tokens": False}):
        message = scripted.chat(**fields).json()["choices"][0]["message"]
        assert message["content"] == "One END two 漢"
        assert message["reasoning_content"] == "Hm, END."


def test_stop_strings_apply_to_the_answer_only(scripted):
    scripted.engine.answer = ANSWER
    choice = scripted.chat(stop=["END"]).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm, END."
    assert choice["message"]["content"] == "One "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_half_character_at_the_end_of_a_budget(scripted, max_tokens):
    bytes_of_text = list("漢👍é".encode())
    answer = [*ids_of("t⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧"), *bytes_of_text]
    scripted.engine.answer = answer
    skip = len(answer) - len(bytes_of_text)
    choice = scripted.chat(max_tokens=skip + min(max_tokens, 9)).json()["choices"][0]
    content = choice["message"]["content"]
    assert "漢👍é".startswith(content.removesuffix("\ufffd"))
    assert choice["finish_reason"] == "length"


def test_continue_final_message(scripted):
    scripted.engine.answer = ids_of(" is 4.⟦close⟧response⟦sep⟧⟦end_of_msg⟧")
    last = {"role": "assistant", "content": "The answer", "reasoning_content": "r"}
    response = scripted.chat(
        messages=[{"role": "user", "content": "q"}, last], continue_final_message=True
    )
    assert response.json()["choices"][0]["message"]["content"] == " is 4."


def test_token_ids_on_request(plain):
    fields = {"return_token_ids": True, "temperature": 0}
    whole = plain.chat(**fields).json()
    prompt, answer = plain.engine.prompts[-1], plain.engine.answer
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == answer
    chunks = plain.events(CHAT, {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert chunks[0]["prompt_token_ids"] == prompt
    assert sum((chunk["choices"][0]["token_ids"] for chunk in chunks), []) == answer


# ---- completions


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_completion_of_every_kind_of_prompt(plain, prompt):
    response = plain.complete(prompt=prompt, max_tokens=4).json()
    assert response["object"] == "text_completion"
    (choice,) = response["choices"]
    assert choice["text"] == TINY.decode(plain.engine.answer[:4])
    assert choice["finish_reason"] == "length"
    assert plain.engine.prompts[-1] == TINY.encode("hi") if prompt != [104, 105] else True
    assert response["usage"]["completion_tokens"] == 4


def test_completion_of_several_prompts(plain):
    prompts = ["one", "two", "three"]
    whole = plain.complete(prompt=prompts, max_tokens=5).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert plain.engine.prompts[-3:] == [TINY.encode(text) for text in prompts]
    chunks = plain.events(
        COMPLETIONS,
        {"prompt": prompts, "max_tokens": 5, "stream_options": {"include_usage": True}},
    )
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_completion_text_is_ordinary(plain):
    plain.complete(prompt="<|end_of_msg|>", max_tokens=1)
    assert max(plain.engine.prompts[-1]) < TINY.n_base


def test_completion_shows_control_tokens_as_asked(scripted):
    scripted.engine.answer = ids_of("a⟦media_pad⟧b⟦sep⟧c⟦end_of_msg⟧")
    assert scripted.complete().json()["choices"][0]["text"] == "ab<|sep|>c"
    shown = scripted.complete(skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == "a<|media_pad|>b<|sep|>c"


@pytest.mark.parametrize("step", [1, 3, 50])
def test_completion_stops(scripted, step):
    scripted.engine.answer, scripted.engine.step_tokens = ids_of("one two three four"), step

    def ends(**fields):
        whole = scripted.complete(max_tokens=100, **fields).json()
        chunks = scripted.events(
            COMPLETIONS, {"prompt": "hi", "max_tokens": 100, **fields, "stream": True}
        )
        choice = whole["choices"][0]
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert streamed == choice["text"]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    assert ends(stop=["ee f", " thr"]) == ("one two", "stop", " thr")
    assert ends(stop="three") == ("one two ", "stop", "three")
    (stop_id,) = TINY.encode("w")
    text, *reasons = ends(stop_token_ids=[stop_id])
    assert text == TINY.decode(scripted.engine.answer[: scripted.engine.answer.index(stop_id)])
    assert reasons == ["stop", stop_id]


def test_continuous_usage(plain):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = plain.events(COMPLETIONS, {"prompt": "hi", "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 16


def test_defaults():
    defaults = GenerationDefaults({"temperature": 0.25, "top_p": 0.5})
    with serving(ScriptedEngine(), defaults=defaults) as running:
        running.complete()
        running.complete(temperature=1.5, seed=3)
        first, second = running.engine.params
        assert (first.temperature, first.top_p, first.max_tokens) == (0.25, 0.5, 16)
        assert (second.temperature, second.top_p, second.seed) == (1.5, 0.5, 3)
        assert first.seed is None  # the engine draws one


# ---- checkpoints without K3's tokenizer


def test_token_ids_only():
    defaults = GenerationDefaults(eos_ids=frozenset({9}))
    with serving(ScriptedEngine(answer=[5, 6, 9]), tokenizer=None, defaults=defaults) as running:
        response = running.complete(prompt=[1, 2], return_token_ids=True).json()
        (choice,) = response["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 9])
        assert choice["prompt_token_ids"] == [1, 2]
        assert choice["finish_reason"] == "stop"
        for refused in (running.complete(), running.complete(prompt=[1], stop="x"), running.chat()):
            assert refused.status_code == 400
            assert "tiktoken.model" in refused.json()["error"]["message"]


def test_vocabulary_without_chat(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, names={2: "<|im_end|>"}))
    with serving(ScriptedEngine(vocab_size=512), tokenizer=tokenizer) as running:
        assert running.complete().json()["choices"][0]["text"] == "x" * 16
        refused = running.chat()
        assert refused.status_code == 400
        assert "<|open|>" in refused.json()["error"]["message"]


# ---- refusals

LONG = "a b " * 3_000
BAD_BODIES = {
    "empty": (b"", None),
    "not_json": (b"{nope", None),
    "not_utf8": (b'{"prompt": "\xff\xfe"}', None),
    "nan": (b'{"prompt": "x", "temperature": NaN}', None),
    "infinite": (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    "a_list": (b"[]", None),
    "a_string": (b'"x"', None),
    "deep": (b"[" * 200_000, None),
    "deep_field": (b'{"prompt": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", None),
    "many_digits": (b'{"prompt": "x", "seed": ' + b"9" * 9_000 + b"}", None),
    "no_prompt": (b"{}", "prompt"),
}


@pytest.mark.parametrize("body, param", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bad_body(plain, body, param):
    check_refused(plain, plain.post(COMPLETIONS, content=body), param)


BAD_FIELDS = {
    "max_tokens_negative": {"max_tokens": -1},
    "max_tokens_zero": {"max_tokens": 0},
    "max_tokens_float": {"max_tokens": 1.5},
    "max_tokens_whole_float": {"max_tokens": 5.0},
    "max_tokens_text": {"max_tokens": "5"},
    "max_tokens_true": {"max_tokens": True},
    "max_tokens_beyond_the_context": {"max_tokens": 5_000},
    "max_tokens_huge": {"max_tokens": 10**30},
    "temperature_negative": {"temperature": -1},
    "temperature_text": {"temperature": "hot"},
    "temperature_list": {"temperature": [1]},
    "top_p_zero": {"top_p": 0},
    "top_p_large": {"top_p": 1.5},
    "top_k": {"top_k": -5},
    "min_p": {"min_p": 2},
    "seed": {"seed": 2**64},
    "stop_number": {"stop": 3},
    "stop_empty": {"stop": ""},
    "stop_many": {"stop": ["x"] * 100_000},
    "stop_long": {"stop": ["x" * 1_000_000]},
    "stop_token_ids_range": {"stop_token_ids": [99_999]},
    "stop_token_ids_text": {"stop_token_ids": ["a"]},
    "stop_token_ids_many": {"stop_token_ids": [1] * 100_000},
    "ignore_eos": {"ignore_eos": "yes"},
    "stream": {"stream": "yes"},
    "stream_options": {"stream_options": {"include_usage": True}},
    "n_zero": {"n": 0},
    "n_huge": {"n": 10**9},
    "n_true": {"n": True},
    "best_of": {"best_of": 3},
    "logit_bias_list": {"logit_bias": [5]},
    "logit_bias_key": {"logit_bias": {"five": 1}},
    "logit_bias_range": {"logit_bias": {"1024": 1}},
    "logit_bias_value": {"logit_bias": {"5": "1"}},
    "logit_bias_large": {"logit_bias": {"5": 101}},
    "presence_penalty": {"presence_penalty": 2.5},
    "frequency_penalty": {"frequency_penalty": "0"},
    "repetition_penalty": {"repetition_penalty": 0},
    "min_tokens_negative": {"min_tokens": -1},
    "min_tokens_beyond_max_tokens": {"min_tokens": 30, "max_tokens": 20},
    "allowed_token_ids_empty": {"allowed_token_ids": []},
    "allowed_token_ids_range": {"allowed_token_ids": [1_024]},
    "bad_words_text": {"bad_words": "x"},
    "bad_words_empty": {"bad_words": [""]},
    "bad_words_long": {"bad_words": ["漢" * 40]},
    "prompt_logprobs_negative": {"prompt_logprobs": -1},
    "prompt_logprobs_many": {"prompt_logprobs": 6},
    "prompt_logprobs_true": {"prompt_logprobs": True},
    "priority": {"priority": "high"},
    "cache_salt_empty": {"cache_salt": ""},
    "cache_salt_number": {"cache_salt": 5},
    "lora_request": {"lora_request": {"lora_name": "a"}},
    "adapter": {"adapter": "a"},
    "guided_json": {"guided_json": {"type": "object"}},
    "no_such_field": {"no_such_field": 1},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_bad_field(plain, path, fields):
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user"}]}
    check_refused(plain, plain.post(path, body | fields), next(iter(fields)))


BAD_COMPLETIONS = {
    "empty_text": {"prompt": ""},
    "empty_list": {"prompt": []},
    "empty_entry": {"prompt": [""]},
    "empty_ids": {"prompt": [[]]},
    "null": {"prompt": None},
    "number": {"prompt": 7},
    "object": {"prompt": {"text": "x"}},
    "mixed": {"prompt": ["x", 1]},
    "mixed_ids": {"prompt": [1, "x"]},
    "id_too_large": {"prompt": [1, 1_024]},
    "id_huge": {"prompt": [10**400]},
    "id_negative": {"prompt": [-1]},
    "id_float": {"prompt": [1.0]},
    "id_true": {"prompt": [True]},
    "too_long": {"prompt": LONG},
    "far_too_long": {"prompt": "a" * 1_000_000},
    "too_many_ids": {"prompt": [1] * 3_000},
    "exactly_full": {"prompt": [1] * 2_000},
    "too_many": {"prompt": ["x"] * 1_000},
    "echo": {"echo": True},
    "logprobs_true": {"logprobs": True},
    "logprobs_negative": {"logprobs": -1},
    "logprobs_many": {"logprobs": 6},
    "include_stop_str_in_output": {"include_stop_str_in_output": 1},
    "suffix": {"suffix": "x"},
}


@pytest.mark.parametrize("fields", BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS.keys())
def test_bad_completion(plain, fields):
    check_refused(plain, plain.complete(**fields), next(iter(fields)))


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "x"}
BAD_CHATS = {
    "no_messages": ({"messages": []}, "messages"),
    "messages_null": ({"messages": None}, "messages"),
    "messages_text": ({"messages": "hi"}, "messages"),
    "message_text": ({"messages": ["hi"]}, "messages[0]"),
    "role": ({"messages": [{"role": "critic"}]}, "messages[0].role"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "too_many": ({"messages": [USER] * 100_000}, "messages"),
    "too_long": ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
    "effort": ({"reasoning_effort": "medium"}, "reasoning_effort"),
    "thinking": ({"thinking": {"type": "odd"}}, "thinking.type"),
    "tools": ({"tools": [FUNCTION]}, "tools"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice"),
    "dynamic_tools": (
        {"messages": [{"role": "system", "tools": [FUNCTION]}, USER]},
        "messages[0].tools",
    ),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
    ),
    "logprobs": ({"logprobs": 1}, "logprobs"),
    "top_logprobs_alone": ({"top_logprobs": 1}, "top_logprobs"),
    "top_logprobs_negative": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    "top_logprobs_many": ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
    "include_stop_str": ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    "chat_template": ({"chat_template": "{{ x }}"}, "chat_template"),
    "prompt_field": ({"prompt": "x"}, "prompt"),
    "max_completion_tokens": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "beyond_the_context": ({"max_completion_tokens": 5_000}, "max_completion_tokens"),
    "deep_arguments": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": "[" * 50_000}},
                    ],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
}


@pytest.mark.parametrize("fields, param", BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_bad_chat(plain, fields, param):
    check_refused(plain, plain.chat(**fields), param)


def check_refused(running, response, param, status=400, where="param"):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error[where] == param
    assert error["message"] and len(error["message"]) < 500
    assert "Traceback" not in response.text
    assert running.complete(max_tokens=1).status_code == 200


def test_null_is_absent(plain):
    names = ("max_tokens", "temperature", "top_p", "stop", "seed", "logit_bias", "tools")
    names += ("tool_choice", "response_format", "stream_options", "user", "n", "stream", "model")
    assert plain.chat(**dict.fromkeys(names)).status_code == 200


def test_neutral_values_are_served(plain):
    fields = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "include_stop_str_in_output": False,
        "presence_penalty": 0.0,
        "tools": [],
        "user": "me",
    }
    fields |= {"response_format": {"type": "text"}, "tool_choice": "auto", "metadata": {"a": "b"}}
    assert plain.chat(**fields).status_code == 200


def test_unknown_model_and_routes(plain):
    check_refused(plain, plain.chat(model="gpt-99"), "model", 404)
    check_refused(plain, plain.client.get("/v1/models/gpt-99"), "model", 404)
    check_refused(plain, plain.client.get("/v1/nothing"), None, 404)
    check_refused(plain, plain.client.get(CHAT), None, 405)


def test_large_body():
    with serving(ScriptedEngine(), limits=Limits(body_bytes=1_000)) as running:
        response = running.complete(prompt="x" * 2_000)
        check_refused(running, response, "request_too_large", 413, "code")

        def parts():
            for _ in range(50):
                yield b" " * 100

        # The server closes while the client may still be sending.
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            response = running.client.post(COMPLETIONS, content=parts())
            check_refused(running, response, "request_too_large", 413, "code")


def test_half_a_surrogate_pair_in_a_message_is_told(plain):
    response = plain.post(COMPLETIONS, content=b'{"prompt": "x", "\\ud800": 1}')
    assert response.status_code == 400


# ---- failures, cancellation, overload, shutdown


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b"]}], ids=str)
def test_a_request_that_fails_alone(scripted, fields):
    for stream in (False, True):
        scripted.engine.fail_after = 0
        response = scripted.complete(stream=stream, **fields)
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["type"] == "internal_server_error"
        assert error["message"] == "the numbers of the script are not finite"
        wait_until(lambda: not scripted.engine.has_work)
        scripted.engine.fail_after = None
        assert scripted.complete().status_code == 200


def test_failure_in_a_stream_is_told_in_the_stream(scripted):
    scripted.engine.fail_after = 3
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
        *chunks, error = scripted.events(path, body)
        assert len(chunks) == 3 + (path == CHAT)
        assert error["error"]["code"] == "generation_failed"
        assert "not finite" in error["error"]["message"]
    scripted.engine.fail_after = None
    assert scripted.complete().status_code == 200


def test_a_request_that_the_engine_aborts(scripted):
    scripted.engine.abort_after = 2
    response = scripted.complete()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "aborted"
    *_, error = scripted.events(COMPLETIONS, {"prompt": "hi"})
    assert error["error"]["code"] == "aborted"


def test_others_go_on_when_a_request_fails():
    engine = ScriptedEngine(step_s=0.005, fail_after=3, failing_prompt=[7])
    with serving(engine) as running:
        good, bad = in_threads(
            lambda: running.complete(max_tokens=60), lambda: running.complete(prompt=[7])
        )
        assert (good.status_code, bad.status_code) == (200, 500)
        assert good.json()["choices"][0]["text"] == "x" * 60
        assert engine.most_running == 2


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_engine_is_a_500_without_details(stream):
    with serving(ScriptedEngine(die_after=0)) as running:
        response = running.complete(stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "internal_server_error"
        assert "secret" not in response.text
        wait_until(lambda: not running.service.engine.alive)
        assert running.client.get("/health").status_code == 503
        assert running.client.get("/ready").status_code == 503
        refused = running.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_ended"


def test_the_end_of_the_engine_in_a_stream():
    with serving(ScriptedEngine(die_after=3)) as running:
        *chunks, error = running.events(COMPLETIONS, {"prompt": "hi"})
        assert len(chunks) == 3
        assert error["error"]["type"] == "internal_server_error"
        assert "secret" not in error["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}], ids=str)
def test_a_client_that_hangs_up_ends_the_generation(fields):
    engine = ScriptedEngine(step_s=0.01, max_model_len=100_000)
    with serving(engine) as running:
        body = {"prompt": "hi", "max_tokens": 50_000} | fields
        for _ in range(5):
            hang_up(running, body, lambda: engine.running)
            wait_until(lambda: not engine.running, 2.0)
        assert engine.num_aborted == 5 * fields.get("n", 1)
        assert not running.service.engine._streams
        assert running.complete().status_code == 200


def test_a_waiting_client_that_hangs_up_is_forgotten():
    engine = ScriptedEngine(step_s=0.01, max_model_len=100_000, max_num_seqs=1)
    with serving(engine) as running:
        body = {"prompt": "hi", "max_tokens": 50_000}
        has_left = threading.Event()
        first = threading.Thread(target=hang_up, args=(running, body, has_left.is_set))
        first.start()
        wait_until(lambda: engine.running)
        hang_up(running, body | {"prompt": "gone"}, lambda: engine.num_waiting == 1)
        wait_until(lambda: not engine.num_waiting, 2.0)
        assert len(engine.running) == 1
        has_left.set()
        first.join(10)
        assert running.complete(max_tokens=2).json()["choices"][0]["text"] == "xx"


def hang_up(running, fields, when) -> None:
    """Sends a request and closes the connection as soon as `when()` is true."""
    body = json.dumps(fields).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    port = int(running.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body)
        wait_until(when)


def have_started(engine: ScriptedEngine, count: int) -> bool:
    """So many requests have told of a step at least."""
    return sum(request.num_steps > 1 for request in engine.running) == count


def in_threads(*calls) -> list:
    """What the calls return that are made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_a_full_queue_is_a_429():
    engine = ScriptedEngine(step_s=0.02, max_num_seqs=1)
    with serving(engine, max_waiting=2) as running:
        threads = [
            threading.Thread(target=running.complete, kwargs={"max_tokens": 20}) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        wait_until(lambda: engine.num_waiting == 2)
        refused = running.complete()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        for thread in threads:
            thread.join(20)
        assert running.complete().status_code == 200


def test_a_burst_may_fill_the_free_rows_and_the_queue():
    """Whoever arrives while the engine is in a step waits for a row only if none is free."""
    engine = ScriptedEngine(step_s=0.3, max_num_seqs=4)
    with serving(engine, max_waiting=2) as running:
        answers = in_threads(*[lambda: running.complete(max_tokens=2)] * 5)
        assert [answer.status_code for answer in answers] == [200] * 5


def test_requests_run_side_by_side():
    """A short request is answered while a long one goes on."""
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running:
        ended = []

        def ask(max_tokens: int) -> None:
            running.complete(max_tokens=max_tokens)
            ended.append(max_tokens)

        in_threads(lambda: ask(150), lambda: ask(5))
        assert ended == [5, 150]
        assert engine.most_running == 2
        assert engine.num_steps < 155


def test_the_loop_stays_free_while_a_model_runs():
    with serving(ScriptedEngine(step_s=0.05)) as running:
        threads = [
            threading.Thread(target=running.complete, kwargs={"max_tokens": 20}),
            threading.Thread(target=running.complete, kwargs={"prompt": "^" * 900_000}),
        ]
        for thread in threads:
            thread.start()
        slowest = 0.0
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            assert running.client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - start)
        assert slowest < 1.0


def test_answers_do_not_mix():
    """Requests at the same time each get their own."""
    with serving(ScriptedEngine(answer=ANSWER, step_tokens=2), max_waiting=100) as running:
        expected = running.chat().json()["choices"][0]["message"]
        messages: list = [None] * 12

        def ask(at: int) -> None:
            if at % 2:
                messages[at] = running.chat().json()["choices"][0]["message"]
            else:
                body = {"messages": [{"role": "user", "content": "hi"}]}
                joined = joined_message(running.events(CHAT, body))
                messages[at] = expected | {
                    key: joined[key] for key in ("content", "reasoning_content")
                }

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert messages == [expected] * 12


def test_shutdown_ends_requests_that_take_too_long(monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 0.3)
    engine = ScriptedEngine(step_s=0.01, max_model_len=100_000)
    with serving(engine) as running, ThreadPoolExecutor() as pool:

        def read() -> list[str]:
            body = {"prompt": "hi", "max_tokens": 90_000, "stream": True}
            with httpx.stream("POST", running.url + COMPLETIONS, json=body) as response:
                return [line for line in response.iter_lines() if line]

        reads = [pool.submit(read) for _ in range(2)]
        wait_until(lambda: have_started(engine, 2))
        running.stop()
        for lines in (future.result(10) for future in reads):
            assert lines[-1] == "data: [DONE]"
            error = json.loads(lines[-2].removeprefix("data: "))["error"]
            assert error["code"] == "shutting_down"
    assert not running.service.engine.alive


def test_shutdown_lets_running_requests_end_and_refuses_the_others():
    engine = ScriptedEngine(step_s=0.02, max_num_seqs=2)
    with serving(engine) as running, ThreadPoolExecutor() as pool:
        asked = [pool.submit(running.complete, max_tokens=50) for _ in range(3)]
        wait_until(lambda: have_started(engine, 2) and engine.num_waiting == 1)
        running.service.engine.drain()
        assert running.client.get("/ready").status_code == 503
        assert running.client.get("/health").status_code == 200
        assert running.complete().status_code == 503
        statuses = [future.result(20).status_code for future in asked]
    assert sorted(statuses) == [200, 200, 503]
    assert not running.service.engine.alive


def test_a_silent_stream_sends_comments(monkeypatch):
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.05)
    with serving(ScriptedEngine(step_s=0.3)) as running:
        response = running.complete(stream=True, max_tokens=2)
        assert response.text.startswith(": still working\n\n")
        assert response.text.count(": still working\n\n") > 4
        assert response.text.endswith("data: [DONE]\n\n")
