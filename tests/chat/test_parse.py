"""The output parser against the goldens, in every division of the ids, and on broken output."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat.parse import Delta, StreamParser, channel_of_prompt, parse
from k3jax.chat.render import render
from k3jax.chat.tokenizer import shipped_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden/chat"
PARSE_CASES = json.loads((GOLDEN / "parse.json").read_text())["cases"]
STREAM_CASES = json.loads((GOLDEN / "stream.json").read_text())["cases"]
TINY = shipped_tokenizer()

parse_cases = pytest.mark.parametrize("case", PARSE_CASES, ids=[c["id"] for c in PARSE_CASES])
stream_cases = pytest.mark.parametrize("case", STREAM_CASES, ids=[c["id"] for c in STREAM_CASES])


def options(case: dict) -> dict:
    reported = case["tools_in_request"] and case["tool_choice"] != "none"
    return {"channel": case["prefill"], "report_tool_calls": reported}


def ids_of(marked: str) -> list[int]:
    """Ids of text in which ⟦name⟧ stands for a control token."""
    ids = []
    for index, part in enumerate(marked.replace("⟧", "⟦").split("⟦")):
        ids += [TINY.special_ids[f"<|{part}|>"]] if index % 2 else TINY.encode(part)
    return ids


def byte_ids_of(marked: str) -> list[int]:
    """The same in which every byte of text is a token of its own."""
    ids = []
    for token_id in ids_of(marked):
        ids += TINY.token_bytes(token_id) if token_id < TINY.n_base else [token_id]
    return ids


def joined(deltas: list[Delta]) -> tuple:
    return (
        "".join(delta.reasoning_content for delta in deltas) or None,
        "".join(delta.content for delta in deltas) or None,
        [call for delta in deltas for call in delta.tool_calls],
    )


def stream(ids: list[int], sizes, **kwargs) -> tuple[list[Delta], StreamParser]:
    parser, deltas, start = StreamParser(TINY, **kwargs), [], 0
    while start < len(ids):
        size = sizes if isinstance(sizes, int) else sizes(start)
        deltas.append(parser.feed(ids[start : start + size]))
        start += size
    return [*deltas, parser.finish()], parser


@parse_cases
def test_golden(case):
    ids = case["output_ids_tiny"]
    assert ids == ids_of(case["output"])
    message = parse(ids, tokenizer=TINY, finish_reason=case["engine_finish"], **options(case))
    expected = case["expected"]
    assert message.reasoning_content == expected["reasoning_content"]
    assert message.content == expected["content"]
    assert message.finish_reason == expected["finish_reason"]
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        (call["name"], call["arguments"]) for call in expected["tool_calls"]
    ]
    for call, wanted in zip(message.tool_calls, expected["tool_calls"], strict=True):
        assert json.loads(call.arguments) == wanted["arguments_json"]


def check_any_division(ids: list[int], replay: bool = False, **kwargs) -> None:
    whole = parse(ids, tokenizer=TINY, **kwargs)
    rng = random.Random(len(ids))
    for sizes in (1, 2, 3, 7, 20, *[lambda _: rng.randint(1, 9)] * 5):
        deltas, parser = stream(ids, sizes, **kwargs)
        assert parser.message() == whole
        reasoning, content, calls = joined(deltas)
        assert (content, calls) == (whole.content, whole.tool_calls)
        assert reasoning == (whole.content if replay else whole.reasoning_content)
    for cut in range(len(ids) + 1):
        parser = StreamParser(TINY, **kwargs)
        deltas = [parser.feed(ids[:cut]), parser.feed(ids[cut:]), parser.finish()]
        assert joined(deltas)[1:] == (whole.content, whole.tool_calls)


@parse_cases
def test_any_division_gives_the_same(case):
    replay = case["stream_rule"] == "replay"
    check_any_division(case["output_ids_tiny"], replay, **options(case))
    check_any_division(byte_ids_of(case["output"]), replay, **options(case))


@parse_cases
def test_tokens_of_bytes_give_the_same(case):
    by_bytes = parse(byte_ids_of(case["output"]), tokenizer=TINY, **options(case))
    by_tokens = parse(case["output_ids_tiny"], tokenizer=TINY, **options(case))
    by_bytes.reasoning_tokens = by_tokens.reasoning_tokens
    assert by_bytes == by_tokens


@parse_cases
def test_truncation_anywhere_keeps_what_was_complete(case):
    """A beginning of the output gives a beginning of the message, never a marker as text."""
    whole = parse(case["output_ids_tiny"], tokenizer=TINY, **options(case))
    shows_markers = "<|" in case["output"]
    for end in range(len(case["output_ids_tiny"])):
        part = parse(case["output_ids_tiny"][:end], tokenizer=TINY, **options(case))
        assert part.tool_calls == whole.tool_calls[: len(part.tool_calls)]
        if case["stream_rule"] == "equal":
            shown = (part.reasoning_content or "").removesuffix("\ufffd")  # half a character
            assert (whole.reasoning_content or "").startswith(shown)
        if not shows_markers:
            assert "<|" not in (part.content or "") + (part.reasoning_content or "")


@stream_cases
def test_golden_deltas(case):
    parser = StreamParser(TINY, **options(case))
    for ids, expected in zip(case["chunk_ids_tiny"], case["expected_deltas"], strict=True):
        delta = asdict(parser.feed(ids))
        for call in delta["tool_calls"]:
            del call["id"]
        assert {key: value for key, value in delta.items() if value} == expected
    assert not parser.finish()
    message = parser.message()
    expected = case["expected_joined"]
    assert message.reasoning_content == expected["reasoning_content"]
    assert message.content == expected["content"]
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    assert calls == expected["tool_calls"]


CALL_F = (
    '⟦open⟧call tool="f" index="1"⟦sep⟧⟦open⟧argument key="x" type="number"⟦sep⟧1'
    "⟦close⟧argument⟦sep⟧⟦close⟧call⟦sep⟧"
)

# Output that public systems got wrong -> reasoning, content, calls.
FAULTS = {
    "tools_opened_while_thinking": (
        f"plan⟦open⟧tools⟦sep⟧{CALL_F}⟦close⟧tools⟦sep⟧⟦close⟧message⟦sep⟧⟦end_of_msg⟧",
        ("plan", None, [("f", '{"x": 1}')]),
    ),
    "think_close_lost_its_sep": (
        "cmp⟦close⟧think⟦open⟧response⟦sep⟧ans⟦close⟧response⟦sep⟧⟦close⟧message⟦sep⟧",
        ("cmp", "ans", []),
    ),
    "marker_spelled_in_an_argument": (
        't⟦open⟧tools⟦sep⟧⟦open⟧call tool="x"⟦sep⟧⟦open⟧argument key="k" type="string"⟦sep⟧'
        'see <|open|>call tool="x"<|sep|> docs⟦close⟧argument⟦sep⟧⟦close⟧call⟦sep⟧',
        ("t", None, [("x", '{"k": "see <|open|>call tool=\\"x\\"<|sep|> docs"}')]),
    ),
    "real_markers_in_an_argument": (
        't⟦open⟧tools⟦sep⟧⟦open⟧call tool="x"⟦sep⟧⟦open⟧argument key="k"⟦sep⟧a⟦open⟧think⟦sep⟧b'
        "⟦close⟧argument⟦sep⟧⟦close⟧call⟦sep⟧",
        ("t", None, [("x", '{"k": "a<|open|>think<|sep|>b"}')]),
    ),
    "unknown_marker_is_text": (
        "a⟦open⟧note⟦sep⟧b⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧c⟦close⟧note⟦sep⟧d⟦sep⟧e",
        ("a<|open|>note<|sep|>b", "c<|close|>note<|sep|>d<|sep|>e", []),
    ),
    "text_after_a_lost_sep_is_no_marker": (
        "a⟦close⟧think and so on⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧b",
        ("a<|close|>think and so on", "b", []),
    ),
    "marker_without_end": (
        "a⟦close⟧" + "x " * 2_000 + "⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧b",
        ("a<|close|>" + "x " * 2_000, "b", []),
    ),
    "unfinished_marker_at_the_end": ("a⟦close⟧think", ("a", None, [])),
    "value_not_closed_before_the_tools_close": (
        't⟦open⟧tools⟦sep⟧⟦open⟧call tool="f"⟦sep⟧⟦open⟧argument key="k"⟦sep⟧v⟦close⟧tools⟦sep⟧',
        ("t", None, []),
    ),
    "argument_without_key": (
        't⟦open⟧tools⟦sep⟧⟦open⟧call tool="f"⟦sep⟧⟦open⟧argument type="number"⟦sep⟧1'
        "⟦close⟧argument⟦sep⟧⟦close⟧call⟦sep⟧",
        ("t", None, [("f", "{}")]),
    ),
    "number_too_large_for_a_float": (
        't⟦open⟧tools⟦sep⟧⟦open⟧call tool="f"⟦sep⟧⟦open⟧argument key="n" type="number"⟦sep⟧1e999'
        "⟦close⟧argument⟦sep⟧⟦close⟧call⟦sep⟧",
        ("t", None, [("f", '{"n": "1e999"}')]),
    ),
    "half_a_surrogate_pair": (
        't⟦open⟧tools⟦sep⟧⟦open⟧call tool="f"⟦sep⟧⟦open⟧argument key="o" type="object"⟦sep⟧'
        '{"a": "\\ud800"}⟦close⟧argument⟦sep⟧⟦close⟧call⟦sep⟧',
        ("t", None, [("f", '{"o": {"a": "\\ud800"}}')]),
    ),
    "value_nested_too_deeply": (
        't⟦open⟧tools⟦sep⟧⟦open⟧call tool="f"⟦sep⟧⟦open⟧argument key="o" type="array"⟦sep⟧'
        f"{'[' * 9_000}⟦close⟧argument⟦sep⟧⟦close⟧call⟦sep⟧",
        ("t", None, [("f", json.dumps({"o": "[" * 9_000}))]),
    ),
    "hidden_control_tokens_never_show": (
        "a⟦media_pad⟧b⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧c⟦media_end⟧",
        ("ab", "c", []),
    ),
    "only_white_space_between_the_channels": ("a⟦close⟧think⟦sep⟧\n", ("a", None, [])),
    "white_space_only_answer_without_calls": (
        "a⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧ \n⟦close⟧response⟦sep⟧",
        ("a", " \n", []),
    ),
}


@pytest.mark.parametrize("output, expected", FAULTS.values(), ids=FAULTS.keys())
def test_fault(output, expected):
    message = parse(ids_of(output), tokenizer=TINY)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    assert (message.reasoning_content, message.content, calls) == expected
    if len(output) < 1_000:
        check_any_division(ids_of(output))


def test_text_in_no_channel():
    def read(output):
        message = parse(ids_of(output), tokenizer=TINY, channel="idle")
        return message.reasoning_content, message.content

    assert read(" plain \n answer \n") == (None, " plain \n answer \n")
    assert read(" plain \n⟦open⟧response⟦sep⟧ answer") == (None, " plain answer")
    assert read("\n⟦open⟧think⟦sep⟧r⟦close⟧think⟦sep⟧x") == ("r", "x")


def test_stop_strings_end_the_answer_and_only_the_answer():
    ids = ids_of("END of thought⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧one END two")
    message = parse(ids, tokenizer=TINY, stop=["END"])
    assert (message.reasoning_content, message.content) == ("END of thought", "one ")
    check_any_division(ids, stop=["END"])
    parser = StreamParser(TINY, stop=["END"])
    parser.feed(ids)
    assert parser.done and parser.stopped_by == "END"


def test_a_begun_stop_string_is_released_at_the_end():
    ids = ids_of("t⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧one EN")
    assert parse(ids, tokenizer=TINY, stop=["END"]).content == "one EN"
    check_any_division(ids, stop=["END"])


def test_skipped_thinking_with_a_stop_string_stays_ended():
    ids = ids_of("one END two⟦close⟧response⟦sep⟧⟦open⟧tools⟦sep⟧" + CALL_F)
    message = parse(ids, tokenizer=TINY, stop=["END"])
    assert (message.reasoning_content, message.content) == (None, "one ")
    assert message.tool_calls == []


def test_ids_and_kinds_of_calls():
    output = f"t⟦open⟧tools⟦sep⟧{CALL_F}{CALL_F}"

    def calls(**kwargs):
        message = parse(ids_of(output), tokenizer=TINY, **kwargs)
        return [call.id for call in message.tool_calls], message.finish_reason

    assert calls() == (["functions.f:0", "functions.f:1"], "tool_calls")
    assert calls(num_previous_calls=3)[0] == ["functions.f:3", "functions.f:4"]
    assert calls(parallel_tool_calls=False)[0] == ["functions.f:0"]
    assert calls(named_tool=True)[1] == "stop"
    assert calls(finish_reason="length")[1] == "length"
    assert calls(report_tool_calls=False) == ([], "stop")


def test_reasoning_tokens_stand_before_the_close_marker():
    thought = TINY.encode("a thought of several tokens")

    def count(rest, **kwargs):
        return parse(thought + ids_of(rest), tokenizer=TINY, **kwargs).reasoning_tokens

    assert count("⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧x") == len(thought)
    assert count("⟦open⟧response⟦sep⟧x") == len(thought)
    assert count("⟦close⟧think⟦open⟧response⟦sep⟧x") == len(thought)
    assert count("⟦end_of_msg⟧") == len(thought)
    assert count("⟦close⟧thi") == len(thought)
    assert count("") == len(thought)
    assert count("⟦close⟧response⟦sep⟧") == 0
    assert count("⟦close⟧response⟦sep⟧", channel="response") == 0


@pytest.mark.parametrize(
    "request_, channel",
    [
        ({}, "think"),
        ({"thinking": {"type": "disabled"}}, "response"),
        ({"add_generation_prompt": False}, "idle"),
    ],
    ids=["thinking", "not_thinking", "history_only"],
)
def test_channel_of_a_prompt(request_, channel):
    rendered = render([{"role": "user", "content": "<|open|>think<|sep|>"}], **request_)
    assert rendered.channel == channel
    assert channel_of_prompt(rendered.token_ids) == channel


TEXT = st.text(st.sampled_from("ab <|>&\"\n⟦é漢🌧 openclosepthink{}[]'\\"), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | TEXT
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(TEXT, v))
CALLS = st.lists(
    st.tuples(TEXT.filter(bool), st.dictionaries(TEXT.filter(bool), VALUES, max_size=3)),
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(reasoning=TEXT, content=TEXT, calls=CALLS, cut=st.integers(1, 30))
def test_a_rendered_turn_parses_back(reasoning, content, calls, cut):
    """Whatever a turn says, in whatever pieces it comes."""
    turn = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [
            {"id": f"c{i}", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    user = {"role": "user", "content": "q"}
    prompt = render([user])
    whole = render([user, turn], add_generation_prompt=False)
    assert whole.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    deltas, parser = stream(whole.token_ids[len(prompt.token_ids) :], cut)

    message = parser.message()
    assert message.reasoning_content == (reasoning if reasoning.strip() else None)
    only_blank = calls and not content.strip()
    assert message.content == (None if only_blank else content or None)
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls
    assert joined(deltas) == (message.reasoning_content, message.content, message.tool_calls)


@settings(max_examples=150, deadline=None)
@given(
    output=st.lists(
        st.sampled_from(
            ["⟦open⟧", "⟦close⟧", "⟦sep⟧", "think", "response", "tools", "message", "call"]
            + ['call tool="f"', 'argument key="k" type="number"', "argument", "json", "1", " ", "x"]
        ),
        max_size=25,
    ),
    channel=st.sampled_from(["think", "response", "idle"]),
    cut=st.integers(1, 5),
)
def test_no_output_breaks_the_parser(output, channel, cut):
    ids = ids_of("".join(output))
    whole = parse(ids, tokenizer=TINY, channel=channel)
    deltas, parser = stream(ids, cut, channel=channel)
    assert parser.message() == whole
    assert joined(deltas)[1:] == (whole.content, whole.tool_calls)
    for call in whole.tool_calls:
        assert isinstance(call.arguments, str)
