"""Chat requests to prompt token ids, by the render program of Kimi K3.

The program writes a list of segments. Control tokens come only from segments that it marks as
special; everything a client sent is ordinary text, tokenised segment by segment, so that no text
can become a control token or move a token boundary.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from k3jax.chat import tokenizer as tok
from k3jax.chat.images import plan_image
from k3jax.chat.tokenizer import Tokenizer, shipped_tokenizer
from k3jax.errors import RequestError

Channel = Literal["think", "response", "idle"]

EFFORTS = ("low", "high", "max")
DEFAULT_EFFORT = "max"

TOOLS_TEXT = """\
# Tools
Here are the available tools, described in JSONSchema.

```json
{json}
```"""
NEW_TOOLS_TEXT = """\
## New Tools Available
The system dynamically extends the toolset via lazy-loading.
You have access to all existing and extended tools.
Here are the specs for the extended tools.

```json
{json}
```"""
EFFORT_TEXT = """\
`thinking_effort` guides on how much to think in your thinking channel (not including the response \
channel), supported values include `low`, `medium`, `high`, and `max`.
Now the system is invoked with `thinking_effort={effort}`."""
TOOL_CHOICE_TEXT = {
    "required": """\
The system is invoked with `tool_choice=required`.
You MUST call tools in the next message.""",
    "none": """\
The system is invoked with `tool_choice=none`.
You MUST NOT call any tools in the next message.""",
}
RESPONSE_FORMAT_TEXT = """\
The system is invoked with `response_format={type}`.
Your response must be raw JSON data without markdown code blocks (```json) or any additional \
formatting."""
SCHEMA_TEXT = """
The JSON data must match the following schema:
```json
{json}
```"""


class Segment(NamedTuple):
    """A stretch of the prompt that is tokenised on its own."""

    special: bool  # control-token names in `text` stand for their ids
    text: str
    generated: bool = False  # part of an assistant turn that the model itself would write


@dataclass(frozen=True)
class Rendered:
    """A prompt."""

    token_ids: list[int]
    segments: list[Segment]
    assistant_mask: list[int]  # 1 for each token that a model wrote, end of message included
    channel: Channel  # where the next generated token belongs

    @property
    def text(self) -> str:
        """The prompt as one string, for reading: it cannot be tokenised back."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Thinking:
    """Whether the model thinks, and how much."""

    enabled: bool = True
    effort: str | None = DEFAULT_EFFORT


def render(
    messages: Sequence[dict],
    tools: Sequence[dict] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    tool_choice: str | dict | None = None,
    response_format: dict | None = None,
    thinking: dict | bool | None = None,
    reasoning_effort: str | None = None,
    chat_template_kwargs: dict | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    image_sizes: Sequence[tuple[int, int]] | None = None,
    max_tokens: int | None = None,
) -> Rendered:
    """The prompt of a chat request; arguments are named and shaped as in the OpenAI API.

    tokenizer: None for the small one that comes with the package.
    thinking, reasoning_effort, chat_template_kwargs: see `resolve_thinking`.
    continue_final_message: leave the last assistant message open instead of starting a new one;
        `"partial": true` in that message asks for the same.
    image_sizes: (width, height) of every image, in the order of `image_parts(messages)`. Without
        them a message with an image is refused.
    max_tokens: refuse prompts that are certain to be longer, before the time to tokenise them.

    Raises `RequestError` naming the field at fault. Names and schemas of tools are not checked.
    """
    tokenizer = tokenizer or shipped_tokenizer()
    tokenizer.require_chat()
    messages = check_messages(messages)
    if not all(isinstance(tool, dict) for tool in _optional(tools, list, "tools") or []):
        raise RequestError("tools must be a list of objects", field="tools")
    mode = resolve_thinking(thinking, reasoning_effort, chat_template_kwargs)
    final = None
    if continue_final_message or (messages[-1]["role"] == "assistant" and messages[-1]["partial"]):
        final, messages = messages[-1], messages[:-1]
        if final["role"] != "assistant":
            raise RequestError(
                "continue_final_message needs an assistant message at the end",
                field="continue_final_message",
            )
        if final["tool_calls"]:
            raise RequestError(
                "a message with tool calls cannot be continued",
                field=f"messages[{len(messages)}].tool_calls",
            )

    writer = _Writer(mode.enabled, iter(image_sizes) if image_sizes is not None else None)
    if tools:
        writer.system("tool-declare", TOOLS_TEXT.format(json=sorted_json(tools)))
    if mode.enabled and mode.effort:
        writer.system("thinking-effort", EFFORT_TEXT.format(effort=mode.effort))
    writer.messages(messages)
    any_tools = bool(tools) or any(message["tools"] for message in messages)
    if any_tools and isinstance(tool_choice, str) and tool_choice in TOOL_CHOICE_TEXT:
        writer.system("tool-choice", TOOL_CHOICE_TEXT[tool_choice])
    if format_text := _response_format_text(response_format):
        writer.system("response-format", format_text)
    channel: Channel = "idle"
    if final is not None:
        channel = writer.open_assistant(final)
    elif add_generation_prompt:
        channel = writer.open_assistant(None)
    writer.check_all_images_used()

    token_ids, mask = encode_segments(tokenizer, writer.segments, max_tokens=max_tokens)
    return Rendered(token_ids, writer.segments, mask, channel)


def encode_segments(
    tokenizer: Tokenizer, segments: Sequence[Segment], *, max_tokens: int | None = None
) -> tuple[list[int], list[int]]:
    """Ids of the segments, each tokenised on its own, and the mask of the generated ones."""
    token_ids: list[int] = []
    mask: list[int] = []
    for segment in segments:
        if max_tokens is not None:
            certain = len(token_ids)
            certain += 1 if segment.special else tokenizer.min_tokens(segment.text)
            if certain > max_tokens:
                raise RequestError(
                    f"the prompt has more than {max_tokens} tokens", field="messages"
                )
        ids = tokenizer.encode(segment.text, special=segment.special)
        token_ids += ids
        mask += [int(segment.generated)] * len(ids)
    return token_ids, mask


def resolve_thinking(
    thinking: dict | bool | None,
    reasoning_effort: str | None,
    chat_template_kwargs: dict | None,
) -> Thinking:
    """The one meaning of the several ways to ask for thinking.

    On or off: `thinking` (the object `{"type", "effort", "keep"}` or a boolean), else
    `enable_thinking`, else off if `reasoning_effort` is "none", else on. Effort: that of `thinking`
    or `thinking_effort`, else `reasoning_effort`, else max. A field of the request goes before the
    one of the same name in `chat_template_kwargs`.
    """
    options = dict(chat_template_kwargs or {})
    for name in options:
        if name not in ("thinking", "enable_thinking", "thinking_effort", "reasoning_effort"):
            raise RequestError(
                f"chat_template_kwargs.{name} is not known: K3 prompts come from a program, "
                "not from a template",
                field=f"chat_template_kwargs.{name}",
            )
    field = "thinking"
    if thinking is None:
        thinking, field = options.get("thinking"), "chat_template_kwargs.thinking"
    effort_field = "reasoning_effort"
    if reasoning_effort is None and "reasoning_effort" in options:
        reasoning_effort = options["reasoning_effort"]
        effort_field = "chat_template_kwargs.reasoning_effort"
    effort, keep = options.get("thinking_effort"), None
    if effort is not None:
        effort_field = "chat_template_kwargs.thinking_effort"
    if isinstance(thinking, dict):
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled"):
            raise RequestError(
                f"{field}.type must be 'enabled' or 'disabled', not {kind!r}",
                field=f"{field}.type",
            )
        if thinking.get("effort") is not None:
            effort, effort_field = thinking["effort"], f"{field}.effort"
        keep = thinking.get("keep")
        thinking = kind == "enabled"
    enabled = _first(thinking, options.get("enable_thinking"), reasoning_effort != "none")
    if not isinstance(enabled, bool):
        raise RequestError(f"{field} must be true, false or an object", field=field)
    if not enabled:
        return Thinking(False, None)
    if keep not in (None, "all"):
        raise RequestError(
            f"{field}.keep must be 'all': K3 keeps the reasoning of every turn",
            field=f"{field}.keep",
        )
    if effort is None:
        effort = DEFAULT_EFFORT if reasoning_effort in (None, "none") else reasoning_effort
    if effort not in EFFORTS:
        raise RequestError(
            f"{effort_field}: {effort!r} is not one of {', '.join(EFFORTS)}", field=effort_field
        )
    return Thinking(True, effort)


def check_messages(messages: Any) -> list[dict]:
    """The messages with every field that rendering reads present and of the right type.

    A null counts as absent, `developer` becomes `system`, content becomes a list of parts.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a non-empty list", field="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def image_parts(messages: Any) -> list[dict]:
    """The image parts in the order in which they stand in the prompt, which is that of the written
    messages except that tool results follow the order of their calls."""
    return [
        part
        for message, _, _ in _in_prompt_order(check_messages(messages))
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def sorted_json(value: Any) -> str:
    """Compact JSON with the keys of every object in code-point order."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


class _Writer:
    """Writes segments."""

    def __init__(self, thinking: bool, image_sizes: Iterator[tuple[int, int]] | None):
        self.segments: list[Segment] = []
        self._thinking = thinking
        self._image_sizes = image_sizes
        self._generated = False

    # -- markup

    def special(self, text: str) -> None:
        self.segments.append(Segment(True, text, self._generated))

    def ordinary(self, text: str) -> None:
        if text:
            self.segments.append(Segment(False, text, self._generated))

    def open(self, tag: str, **attributes: str | None) -> None:
        self.special(tok.OPEN)
        self.ordinary(tag)
        for key, value in attributes.items():
            if value is not None:
                self.ordinary(f" {key}")
                self.ordinary('="')
                self.ordinary(value.replace("&", "&amp;").replace('"', "&quot;"))
                self.ordinary('"')
        self.special(tok.SEP)

    def close(self, tag: str) -> None:
        self.special(tok.CLOSE)
        self.ordinary(tag)
        self.special(tok.SEP)

    def end_message(self) -> None:
        self.close("message")
        self.special(tok.END_OF_MSG)
        self._generated = False

    # -- messages

    def system(self, kind: str, body: str) -> None:
        self.open("message", role="system", type=kind)
        self.ordinary(body)
        self.end_message()

    def messages(self, messages: list[dict]) -> None:
        for message, tool_name, index in _in_prompt_order(messages):
            role = message["role"]
            if message["tools"]:
                text = NEW_TOOLS_TEXT.format(json=sorted_json(message["tools"]))
                self.system("tool-declare", text)
            elif role == "assistant":
                self.assistant(message)
            else:
                if role == "tool":
                    self.open("message", role=role, tool=tool_name, index=str(index))
                else:
                    self.open("message", role=role, name=message["name"] or None)
                self.content(message)
                self.end_message()

    def assistant(self, message: dict) -> None:
        self.open("message", role="assistant", name=message["name"] or None)
        self._generated = True
        if self._thinking:
            self.open("think")
            self.ordinary(message["reasoning"] if message["reasoning"].strip() else "")
            self.close("think")
        self.open("response")
        self.content(message)
        self.close("response")
        if message["tool_calls"]:
            self.open("tools")
            for position, call in enumerate(message["tool_calls"], start=1):
                self.call(call, position)
            self.close("tools")
        self.end_message()

    def call(self, call: dict, position: int) -> None:
        self.open("call", tool=call["name"], index=str(position))
        arguments = call["arguments"]
        if isinstance(arguments, str):
            self.open("json", type="object")
            self.ordinary(arguments)
            self.close("json")
        else:
            for key, value in arguments.items():
                self.open("argument", key=key, type=_json_type(value))
                is_text = isinstance(value, str)
                self.ordinary(value if is_text else json.dumps(value, ensure_ascii=False))
                self.close("argument")
        self.close("call")

    def content(self, message: dict) -> None:
        for part in message["content"]:
            if part["type"] == "text":
                self.ordinary(part["text"])
            else:
                self.image()

    def image(self) -> None:
        if self._image_sizes is None:
            raise RequestError("images are not served yet", field="messages")
        size = next(self._image_sizes, None)
        if size is None:
            raise RequestError("image_sizes has fewer entries than there are images")
        width, height = size
        if width < 1 or height < 1:
            raise RequestError(f"an image of {width}x{height} pixels is empty", field="messages")
        pads = tok.MEDIA_PAD * plan_image(width, height).num_tokens
        self.special(
            f"{tok.MEDIA_BEGIN}image {width}x{height}{tok.MEDIA_CONTENT}{pads}{tok.MEDIA_END}"
        )

    def check_all_images_used(self) -> None:
        if self._image_sizes is not None and next(self._image_sizes, None) is not None:
            raise RequestError("image_sizes has more entries than there are images")

    def open_assistant(self, final: dict | None) -> Channel:
        """The generation prompt, with the text of `final` left open in the channel it ends in."""
        self.open("message", role="assistant")
        reasoning, content = (final["reasoning"], final["content"]) if final else ("", [])
        if self._thinking:
            self.open("think")
            self.ordinary(reasoning)
            if not any(part.get("text", "image") for part in content):
                return "think"
            self.close("think")
        self.open("response")
        if final:
            self.content(final)
        return "response"


def _in_prompt_order(messages: list[dict]) -> Iterator[tuple[dict, str | None, int]]:
    """Every message with, for tool results, the name of the tool and the index.

    A run of tool results is put into the order of the calls if all of them answer one.
    """
    calls: list[dict] = []
    index = 0
    for is_tool, run in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if not is_tool:
            for message in run:
                if message["role"] == "assistant":
                    calls, index = message["tool_calls"], 0
                yield message, None, 0
            continue
        results = list(run)
        position: dict[str, int] = {}
        for at, call in enumerate(calls):
            if call["id"] is not None:
                position.setdefault(call["id"], at)
        matched = all(result["tool_call_id"] in position for result in results)
        if matched:
            results.sort(key=lambda result: position[result["tool_call_id"]])
        for result in results:
            index += 1
            if matched:
                name = calls[position[result["tool_call_id"]]]["name"]
            else:
                name = result["tool"] or result["name"]
                if not name and index <= len(calls):
                    name = calls[index - 1]["name"]
            if not name:
                raise RequestError(
                    f"tool_call_id {result['tool_call_id']!r} answers no call of the last "
                    "assistant message, and the tool has no name",
                    field=f"{result['field']}.tool_call_id",
                )
            yield result, name, index


def _check_message(message: Any, field: str) -> dict:
    if not isinstance(message, dict):
        raise RequestError(f"{field} must be an object", field=field)
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(
            f"{field}.role must be system, developer, user, assistant or tool, not {role!r}",
            field=f"{field}.role",
        )
    checked: dict[str, Any] = {
        "field": field,
        "role": role,
        "content": _check_content(message.get("content"), f"{field}.content"),
        "tools": None,
        "tool_calls": [],
    }
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id", "tool"):
        checked[name] = _optional(message.get(name), str, f"{field}.{name}")
    checked["reasoning"] = checked.pop("reasoning_content") or checked["reasoning"] or ""
    checked["partial"] = _optional(message.get("partial"), bool, f"{field}.partial") or False
    if checked["partial"] and role != "assistant":
        raise RequestError(
            f"{field}.partial is for assistant messages only", field=f"{field}.partial"
        )
    calls = _optional(message.get("tool_calls"), list, f"{field}.tool_calls") or []
    if calls and role != "assistant":
        raise RequestError(
            f"{field}.tool_calls is for assistant messages only", field=f"{field}.tool_calls"
        )
    for at, call in enumerate(calls):
        checked["tool_calls"].append(_check_call(call, f"{field}.tool_calls[{at}]"))
    tools = _optional(message.get("tools"), list, f"{field}.tools")
    if tools:
        if role != "system":
            raise RequestError(f"{field}.tools is for system messages only", field=f"{field}.tools")
        if any(part.get("text", "image") for part in checked["content"]):
            raise RequestError(
                f"{field} declares tools, so its content must be empty", field=f"{field}.content"
            )
        checked["tools"] = tools
    return checked


def _check_content(content: Any, field: str) -> list[dict]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{field} must be text or a list of parts", field=field)
    for at, part in enumerate(content):
        where = f"{field}[{at}]"
        if not isinstance(part, dict):
            raise RequestError(f"{where} must be an object", field=where)
        kind = part.get("type")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise RequestError(f"{where}.text must be text", field=f"{where}.text")
        elif kind != "image_url":
            raise RequestError(
                f"{where}.type must be text or image_url, not {kind!r}: K3 reads text and images",
                field=f"{where}.type",
            )
    return content


def _check_call(call: Any, field: str) -> dict:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RequestError(f"{field}.function must be an object", field=f"{field}.function")
    if call.get("type") not in (None, "function"):
        raise RequestError(f"{field}.type must be 'function'", field=f"{field}.type")
    function = call["function"]
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{field}.function.name must be a name", field=f"{field}.function.name")
    return {
        "id": _optional(call.get("id"), str, f"{field}.id"),
        "name": name,
        "arguments": _check_arguments(function.get("arguments"), f"{field}.function.arguments"),
    }


def _check_arguments(arguments: Any, field: str) -> dict | str:
    """The arguments of a call, or the text itself if it is not JSON."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            parsed = json.loads(arguments, parse_constant=_refuse_constant)
        except ValueError:
            return arguments
        except RecursionError:
            raise RequestError(f"{field} is nested too deeply", field=field) from None
        arguments = parsed
    elif arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{field} must be a JSON object", field=field)
    return arguments


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _response_format_text(response_format: dict | None) -> str:
    if response_format is None:
        return ""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return ""
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, not {kind!r}",
            field="response_format.type",
        )
    text = RESPONSE_FORMAT_TEXT.format(type=kind)
    if kind == "json_object":
        return text
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "response_format.json_schema.schema must be an object",
            field="response_format.json_schema.schema",
        )
    return text + SCHEMA_TEXT.format(json=sorted_json(schema))


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "number"


def _optional(value: Any, kind: type, field: str) -> Any:
    if value is not None and not isinstance(value, kind):
        expected = {str: "text", bool: "true or false", list: "a list"}[kind]
        raise RequestError(f"{field} must be {expected}", field=field)
    return value


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
