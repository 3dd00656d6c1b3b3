"""Generated token ids to reasoning, answer and tool calls.

The model writes channels between control tokens:

    reasoning <close>think<sep> <open>response<sep> answer <close>response<sep>
    [<open>tools<sep> calls <close>tools<sep>] <close>message<sep> <end_of_msg>

A marker is the control token open or close, text, and the control token sep. The parser works on
ids, so text that merely spells a marker is text. It is a state machine that reads one id at a time:
whatever the division into chunks, the joined deltas are the message.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from k3jax.chat import tokenizer as tok
from k3jax.chat.render import Channel
from k3jax.chat.stops import StopMatcher
from k3jax.chat.tokenizer import Detokenizer, Tokenizer, shipped_tokenizer

# States in which what is no known marker is shown.
TEXT_STATES = ("think", "idle", "response")
# There, a marker that has grown to this length without its sep is text: the stream must not stall.
MAX_MARKER_TOKENS = 256

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class ToolCall:
    """A complete call."""

    index: int  # its place among the calls of the message
    id: str
    name: str
    arguments: str  # JSON text


@dataclass
class Delta:
    """What some ids added to the message; reasoning stands before content, content before calls."""

    reasoning_content: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning_content or self.content or self.tool_calls)


@dataclass
class Message:
    """An assistant message; None stands for a channel without text."""

    reasoning_content: str | None
    content: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    reasoning_tokens: int


def parse(
    token_ids: Iterable[int],
    *,
    tokenizer: Tokenizer | None = None,
    finish_reason: str = "stop",
    **options: Any,
) -> Message:
    """The message of a whole generation.

    finish_reason: why generation ended, "stop" or "length"; that of the message can also be
        "tool_calls".
    options: those of `StreamParser`.
    """
    parser = StreamParser(tokenizer, **options)
    parser.feed(token_ids)
    parser.finish()
    return parser.message(finish_reason)


def channel_of_prompt(token_ids: Sequence[int], tokenizer: Tokenizer | None = None) -> Channel:
    """The channel that a prompt leaves open, found from its last opening marker."""
    tokenizer = tokenizer or shipped_tokenizer()
    ids = tokenizer.special_ids
    sep = len(token_ids)
    for position in reversed(range(len(token_ids))):
        if token_ids[position] in (ids[tok.CLOSE], ids[tok.END_OF_MSG]):
            return "idle"
        if token_ids[position] == ids[tok.SEP]:
            sep = position
        if token_ids[position] == ids[tok.OPEN]:
            match tokenizer.decode(token_ids[position + 1 : sep]), sep < len(token_ids):
                case "think", True:
                    return "think"
                case "response", True:
                    return "response"
            return "idle"
    return "idle"


class StreamParser:
    """Reads generated ids and gives what they add to the message.

    tokenizer: None for the small one that comes with the package.
    channel: where generation starts, `Rendered.channel` of the prompt.
    report_tool_calls: False for requests without tools or with `tool_choice` none; calls are then
        read and dropped.
    parallel_tool_calls: False to report only the first call.
    named_tool: the request forced one function by name, so a call ends with reason "stop".
    num_previous_calls: tool calls in the request's history; the ids of new ones count on.
    stop: strings that end the message where they occur in the answer.
    min_tokens: ids before which stop strings do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        channel: Channel = "think",
        report_tool_calls: bool = True,
        parallel_tool_calls: bool = True,
        named_tool: bool = False,
        num_previous_calls: int = 0,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer = tokenizer or shipped_tokenizer()
        tokenizer.require_chat()
        ids = tokenizer.special_ids
        self._open, self._close = ids[tok.OPEN], ids[tok.CLOSE]
        self._sep, self._end = ids[tok.SEP], ids[tok.END_OF_MSG]
        self._control = frozenset((self._open, self._close, self._sep, self._end))
        self._report_tool_calls = report_tool_calls
        self._parallel_tool_calls = parallel_tool_calls
        self._named_tool = named_tool
        self._num_previous_calls = num_previous_calls

        self._state: str = channel
        self._handlers = {
            "think": self._in_think,
            "idle": self._in_idle,
            "response": self._in_response,
            "epilogue": self._in_epilogue,
            "tools": self._in_tools,
            "call": self._in_call,
            "value": self._in_value,
        }
        self._text = Detokenizer(tokenizer)
        self._marker: list[int] | None = None  # the ids so far of an unfinished marker
        self._position = 0  # of the id that is being read
        self._marker_start = 0  # position of the last marker
        self._think_start = 0  # position at which the current think channel begins
        self.reasoning_tokens = 0  # of the channels that are complete

        self._reasoning: list[str] = []
        self._channel_start = 0  # where in _reasoning the current think channel begins
        self._content: list[str] = []
        self._stops = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._leading_blank = ""  # white space that is dropped if only calls follow
        self._idle_blank = ""  # white space that is dropped if a channel follows
        self._calls: list[ToolCall] = []
        self._call = _Call(None)
        self._taken = (0, 0, 0)  # lengths of reasoning, content and calls already given out
        self._skipped_reasoning = ""  # taken back from _reasoning, but due as a delta

    # -- use

    def feed(self, token_ids: Iterable[int]) -> Delta:
        """Reads more ids."""
        for token_id in token_ids:
            if self.done:
                break
            self._read(token_id)
            self._position += 1
        return self._take_delta()

    def finish(self) -> Delta:
        """Ends the message and releases what was held back. What is unfinished is dropped: a
        marker, a call."""
        if not self.done:
            if self._marker is None:
                self._marker_start = self._position
            self._marker = None
            self._flush_text()
            self._finish_message()
        return self._take_delta()

    @property
    def done(self) -> bool:
        """The message is complete and further ids are ignored."""
        return self._state == "done"

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found in the answer."""
        return self._stops.matched

    def message(self, finish_reason: str = "stop") -> Message:
        """The message as far as it was read; `finish_reason` as in `parse`."""
        if finish_reason == "stop" and self._calls and not self._named_tool:
            finish_reason = "tool_calls"
        return Message(
            reasoning_content="".join(self._reasoning) or None,
            content="".join(self._content) or None,
            tool_calls=list(self._calls),
            finish_reason=finish_reason,
            reasoning_tokens=self.reasoning_tokens,
        )

    # -- from ids to events

    def _read(self, token_id: int) -> None:
        if token_id in self._control:
            self._flush_text()
            pending, self._marker = self._marker, None
            if token_id == self._end:
                if pending is None:
                    self._marker_start = self._position
                self._finish_message()
            elif token_id != self._sep:
                if pending is not None:  # a marker that lost its sep ends where the next begins
                    self._handle(self._marker_event(pending, has_sep=False))
                self._marker = [token_id]
                self._marker_start = self._position
            elif pending is not None:
                self._handle(self._marker_event(pending, has_sep=True))
            else:
                self._emit(tok.SEP)
        elif self._marker is None:
            self._emit(self._text.feed((token_id,)))
        else:
            self._marker.append(token_id)
            if len(self._marker) > MAX_MARKER_TOKENS and self._state in TEXT_STATES:
                first, *inner = self._marker
                self._marker = None
                self._emit(tok.OPEN if first == self._open else tok.CLOSE)
                self._emit(self._text.feed(inner))

    def _marker_event(self, ids: list[int], *, has_sep: bool) -> "_Event":
        kind, name = ("open", tok.OPEN) if ids[0] == self._open else ("close", tok.CLOSE)
        inner = self._tokenizer.decode(ids[1:], skip_special_tokens=True)
        tag, rest = [*inner.split(maxsplit=1), "", ""][:2]
        attributes = {
            key: value.replace("&quot;", '"').replace("&amp;", "&")
            for key, value in _ATTRIBUTE.findall(rest)
        }
        if not has_sep and _ATTRIBUTE.sub("", rest).strip():
            tag = ""  # text followed a lost sep: not certain enough to be a marker
        return _Event(kind, tag, attributes, name + inner + (tok.SEP if has_sep else ""))

    def _emit(self, text: str) -> None:
        if text:
            self._handle(_Event("text", "", {}, text))

    def _flush_text(self) -> None:
        self._emit(self._text.finish())

    # -- states: an event that a state does not know is text, or ignored after the answer

    def _handle(self, event: "_Event") -> None:
        if self.done:
            return
        if (event.kind, event.tag) == ("close", "message"):
            self._finish_message()
        else:
            self._handlers[self._state](event)

    def _in_think(self, event: "_Event") -> None:
        match event.kind, event.tag:
            case "close", "think":
                self._leave("idle")
            case "open", "response":
                self._leave("response")
            case "open", "tools":
                self._leave("tools")
            case "close", "response":
                # Only an answer is closed so: the model skipped its thinking. Deltas that went out
                # as reasoning cannot be recalled, so the text follows once more as content.
                skipped = "".join(self._reasoning[self._channel_start :])
                self._skip_thinking()
                self._add_content(skipped)
                self._leave("epilogue")
            case "open", "think" if len(self._reasoning) == self._channel_start:
                pass
            case _:
                self._reasoning.append(event.text)

    def _in_idle(self, event: "_Event") -> None:
        match event.kind, event.tag:
            case "open", "think" | "response" | "tools":
                self._idle_blank = ""
                self._leave(event.tag)
            case _:
                text = self._idle_blank + event.text
                shown = text.rstrip()
                self._idle_blank = text[len(shown) :]
                self._add_content(shown)

    def _in_response(self, event: "_Event") -> None:
        match event.kind, event.tag:
            case "close", "response":
                self._leave("epilogue")
            case "open", "tools":
                self._leave("tools")
            case _:
                self._add_content(event.text)

    def _in_epilogue(self, event: "_Event") -> None:
        if (event.kind, event.tag) == ("open", "tools"):
            self._leave("tools")

    def _in_tools(self, event: "_Event") -> None:
        match event.kind, event.tag:
            case "open", "call":
                self._call = _Call(event.attributes.get("tool"))
                self._leave("call")
            case "close", "tools":
                self._leave("epilogue")

    def _in_call(self, event: "_Event") -> None:
        match event.kind, event.tag:
            case "open", "argument" | "json":
                self._call.open_value(event)
                self._leave("value")
            case "close", "call":
                self._report(self._call)
                self._leave("tools")
            case _:
                self._in_tools(event)  # the next call, or the end: this one is dropped

    def _in_value(self, event: "_Event") -> None:
        match event.kind, event.tag:
            case "close", self._call.tag:
                self._call.close_value()
                self._leave("call")
            case "close", "call" | "tools":
                self._in_call(event)  # without this value
            case _:
                self._call.value.append(event.text)

    # -- what states do

    def _leave(self, state: str) -> None:
        if self.done:
            return
        if self._state == "think":
            self.reasoning_tokens += self._marker_start - self._think_start
        elif self._state in TEXT_STATES:
            self._release_content(self._stops.finish())
        self._state = state
        if state == "think":
            self._channel_start = len(self._reasoning)
            self._think_start = self._position + 1

    def _skip_thinking(self) -> None:
        self._think_start = self._marker_start
        given = self._taken[0]
        self._skipped_reasoning += "".join(self._reasoning[given:])
        del self._reasoning[self._channel_start :]
        self._taken = (len(self._reasoning), *self._taken[1:])

    def _add_content(self, text: str) -> None:
        if self._position < self._min_tokens:
            self._release_content(text)
            return
        self._release_content(self._stops.feed(text))
        if self._stops.matched is not None:
            self._finish_message()

    def _release_content(self, text: str) -> None:
        text = self._leading_blank + text
        if not self._content and (not text or text.isspace()):
            self._leading_blank = text
        else:
            self._leading_blank = ""
            if text:
                self._content.append(text)

    def _report(self, call: "_Call") -> None:
        if not call.name or not self._report_tool_calls:
            return
        if self._calls and not self._parallel_tool_calls:
            return
        index = len(self._calls)
        call_id = f"functions.{call.name}:{self._num_previous_calls + index}"
        self._calls.append(ToolCall(index, call_id, call.name, call.arguments_json()))

    def _finish_message(self) -> None:
        self._leave("done")
        if self._content:
            self._release_content(self._idle_blank)
        elif not self._calls and self._leading_blank:
            self._content.append(self._leading_blank)
        self._idle_blank = self._leading_blank = ""

    def _take_delta(self) -> Delta:
        reasoning, content, calls = self._taken
        delta = Delta(
            self._skipped_reasoning + "".join(self._reasoning[reasoning:]),
            "".join(self._content[content:]),
            self._calls[calls:],
        )
        self._taken = (len(self._reasoning), len(self._content), len(self._calls))
        self._skipped_reasoning = ""
        return delta


class _Event(NamedTuple):
    kind: str  # "text", "open" or "close"
    tag: str
    attributes: dict[str, str]
    text: str  # the event as text


class _Call:
    """A call that is being read."""

    def __init__(self, name: str | None):
        self.name = name
        self.tag = ""  # of the value that is being read: "argument" or "json"
        self.value: list[str] = []
        self._attributes: dict[str, str] = {}
        self._arguments: dict[str, str] = {}  # JSON text of each value
        self._raw: str | None = None  # the text of a json element

    def open_value(self, event: _Event) -> None:
        self.tag, self._attributes, self.value = event.tag, event.attributes, []

    def close_value(self) -> None:
        text = "".join(self.value)
        if self.tag == "json":
            self._raw = text
        elif "key" in self._attributes:
            value = _argument_json(text, self._attributes.get("type", "string"))
            self._arguments[self._attributes["key"]] = value

    def arguments_json(self) -> str:
        """The object of all arguments; a json element stands for itself."""
        if self._raw is not None:
            return self._raw
        pairs = (f"{_dump(key)}: {value}" for key, value in self._arguments.items())
        return "{" + ", ".join(pairs) + "}"


def _argument_json(text: str, kind: str) -> str:
    """The JSON text of an argument; what should be JSON and is not becomes a string."""
    if kind != "string":
        try:
            return _dump(json.loads(text, parse_constant=_refuse, parse_float=_finite))
        except (ValueError, RecursionError):
            pass
    return _dump(text)


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can spell
        return json.dumps(value)
    return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value
