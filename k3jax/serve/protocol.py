"""The wire format of the OpenAI endpoints: request fields, response objects, errors."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from k3jax.chat.parse import Delta, Message
from k3jax.errors import RequestError
from k3jax.serve.outputs import Output, Step

# -- requests

Prompt = Annotated[
    Any,  # checked by hand: a union of lists gives errors that name no entry
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class GenerationRequest(BaseModel):
    """Fields of every request that generates. A null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, description="One of /v1/models; the served model if absent.")
    max_tokens: int | None = Field(None, description="Most tokens to generate.")
    temperature: float | None = Field(None, description="0 always takes the most likely token.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 keeps all tokens.")
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = Field(None, description="Text that ends the answer.")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(
        None, description="include_usage, continuous_usage_stats."
    )
    return_token_ids: bool | None = Field(
        None, description="Also return the ids of the prompt and of the answer."
    )
    skip_special_tokens: bool | None = Field(
        None, description="False shows hidden control tokens in completions; chat has none."
    )


class CompletionRequest(GenerationRequest):
    """A body of /v1/completions. Text is never read as control tokens; send ids for those."""

    prompt: Prompt


class ChatRequest(GenerationRequest):
    """A body of /v1/chat/completions."""

    messages: list[Any] = Field(json_schema_extra={"items": {"type": "object"}})
    max_completion_tokens: int | None = Field(None, description="Goes before max_tokens.")
    thinking: bool | dict[str, Any] | None = Field(None, description="type, effort, keep.")
    reasoning_effort: str | None = Field(None, description="none, low, high or max.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="thinking, enable_thinking, thinking_effort, reasoning_effort."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


# Known fields that cannot be served yet, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
}
NOT_SERVED_COMPLETION: dict[str, tuple] = NOT_SERVED | {"logprobs": (), "suffix": ("",)}
NOT_SERVED_CHAT: dict[str, tuple] = NOT_SERVED | {
    "audio": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "prediction": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
# Fields that say something about the client or its account, or have no meaning for K3.
WITHOUT_EFFECT = frozenset(
    {
        "add_special_tokens",  # K3 prompts have none
        "cache_salt",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)

R = TypeVar("R", bound=GenerationRequest)


def parse_request(body: bytes, kind: type[R]) -> R:
    """The request that a body holds; whatever is wrong with it is a `RequestError`."""
    fields = _load_object(body)
    not_served = NOT_SERVED_CHAT if issubclass(kind, ChatRequest) else NOT_SERVED_COMPLETION
    for name, neutral in not_served.items():
        value = fields.pop(name, None)
        if value is not None and not any(_same(value, wanted) for wanted in neutral):
            raise RequestError(f"{name} is not served yet", field=name)
    if "chat_template" in fields:
        raise RequestError(
            "chat_template: the prompts of K3 are written by a program, not by a template",
            field="chat_template",
        )
    try:
        request = kind.model_validate({k: v for k, v in fields.items() if k not in WITHOUT_EFFECT})
    except ValidationError as error:
        raise _request_error(error) from None
    _check_stream_options(request)
    return request


def _load_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, without its nulls."""
    try:
        fields = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _same(value: Any, wanted: Any) -> bool:
    """Equal as JSON values, where true is not 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        message = f"{name} is required"
    elif first["type"] == "extra_forbidden":
        message = f"{name!r:.80} is not a field of this request"
    else:
        message = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return RequestError(message, field=name)


def _check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    for name, value in options.items():
        field = f"stream_options.{name}"
        if name not in ("include_usage", "continuous_usage_stats"):
            raise RequestError(f"{field!r:.80} is not known", field=field)
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{field} must be true or false", field=field)


# -- responses


class Answer:
    """The response objects of one request; subclasses know the shape of their endpoint."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, request: GenerationRequest, model: str, outputs: list[Output]):
        self._request = request
        self._outputs = outputs
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        options = request.stream_options or {}
        self._include_usage = bool(options.get("include_usage"))
        self._continuous_usage = bool(options.get("continuous_usage_stats"))

    def whole(self) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = [self.choice(index, output) for index, output in enumerate(self._outputs)]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage()}

    def chunks(self, step: Step) -> Iterator[dict[str, Any]]:
        """The chunks of a stream that tell of one step."""
        for choice in self.step_choices(step):
            yield self._chunk([choice], self.usage() if self._continuous_usage else None)

    def last_chunk(self) -> dict[str, Any] | None:
        """The chunk behind all choices, if usage was asked for."""
        return self._chunk([], self.usage()) if self._include_usage else None

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        prompt = sum(len(output.prompt_ids) for output in self._outputs)
        completion = sum(len(output.token_ids) for output in self._outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """One finished choice."""
        raise NotImplementedError

    def step_choices(self, step: Step) -> Iterator[dict[str, Any]]:
        """What a step adds to its choice."""
        raise NotImplementedError

    def _chunk(self, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._include_usage or self._continuous_usage:
            chunk["usage"] = usage
        return chunk


class CompletionAnswer(Answer):
    """/v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        return self._choice(
            index,
            output.text,
            output.finish_reason,
            output.stop_reason,
            {"prompt_token_ids": output.prompt_ids, "token_ids": output.token_ids},
        )

    def step_choices(self, step: Step) -> Iterator[dict[str, Any]]:
        ids: dict[str, Any] = {"token_ids": step.token_ids}
        if step.is_first:
            ids["prompt_token_ids"] = self._outputs[step.index].prompt_ids
        if step.delta.content or step.finish_reason or self._request.return_token_ids:
            yield self._choice(
                step.index, step.delta.content, step.finish_reason, step.stop_reason, ids
            )

    def _choice(self, index: int, text: str, finish: Any, stop: Any, ids: dict) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop,
        }
        return choice | ids if self._request.return_token_ids else choice


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        response = super().whole()
        if self._request.return_token_ids:
            response["prompt_token_ids"] = self._outputs[0].prompt_ids
        return response

    def usage(self) -> dict[str, Any]:
        reasoning = sum(output.reasoning_tokens for output in self._outputs)
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": reasoning}}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        return self._choice(
            index,
            {"message": message_object(output.message())},
            output.finish_reason,
            output.stop_reason,
            output.token_ids,
        )

    def chunks(self, step: Step) -> Iterator[dict[str, Any]]:
        chunks = super().chunks(step)
        if step.is_first and self._request.return_token_ids:
            yield next(chunks) | {"prompt_token_ids": self._outputs[step.index].prompt_ids}
        yield from chunks

    def step_choices(self, step: Step) -> Iterator[dict[str, Any]]:
        if step.is_first:
            role = {"role": "assistant", "content": ""}
            yield self._choice(step.index, {"delta": role}, None, None, [])
        if step.delta or (self._request.return_token_ids and step.token_ids):
            delta = {"delta": delta_object(step.delta)}
            yield self._choice(step.index, delta, None, None, step.token_ids)
        if step.finish_reason:
            yield self._choice(step.index, {"delta": {}}, step.finish_reason, step.stop_reason, [])

    def _choice(
        self, index: int, said: dict, finish: Any, stop: Any, token_ids: list[int]
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        choice["stop_reason"] = stop
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
        return choice


def message_object(message: Message) -> dict[str, Any]:
    """An assistant message; both names of the reasoning that clients look for."""
    said: dict[str, Any] = {
        "role": "assistant",
        "content": message.content,
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning_content,
        "refusal": None,
    }
    if message.tool_calls:
        said["tool_calls"] = [tool_call_object(call) for call in message.tool_calls]
    return said


def delta_object(delta: Delta) -> dict[str, Any]:
    """The part of a message that a chunk carries."""
    said: dict[str, Any] = {}
    if delta.reasoning_content:
        said["reasoning_content"] = said["reasoning"] = delta.reasoning_content
    if delta.content:
        said["content"] = delta.content
    if delta.tool_calls:
        said["tool_calls"] = [
            {"index": call.index, **tool_call_object(call)} for call in delta.tool_calls
        ]
    return said


def tool_call_object(call: Any) -> dict[str, Any]:
    """A tool call as a message shows it."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


# -- errors


class Problem(Exception):
    """An answer other than the one that was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def problem_of(error: BaseException) -> Problem:
    """How an exception looks from outside; nothing of the inside is told."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError):
        return Problem(400, str(error), kind="invalid_request_error", param=error.field)
    return Problem(
        500, "the server failed to answer; its log has the reason", kind="internal_server_error"
    )


def dump(content: Any) -> bytes:
    """Compact UTF-8 JSON of anything, half surrogate pairs included."""
    try:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(content, separators=(",", ":")).encode()
