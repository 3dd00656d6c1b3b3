"""The wire format of the OpenAI endpoints: the fields of requests."""

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from k3jax.engine.request import SamplingParams
from k3jax.errors import RequestError

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
    n: int | None = Field(None, description="Answers to each prompt.")
    max_tokens: int | None = Field(None, description="Most tokens to generate.")
    min_tokens: int | None = Field(None, description="No stop token is chosen before.")
    temperature: float | None = Field(None, description="0 always takes the most likely token.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 keeps all tokens.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token ids to added logits.")
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = Field(None, description="Text that ends the answer.")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(
        None, description="Report each prompt token's logprob and so many of the likeliest."
    )
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
    priority: int | None = Field(
        None, description="With --scheduling-policy priority, lower values are served first."
    )
    cache_salt: str | None = Field(
        None, description="Only requests with the same salt share cached prefixes."
    )

    def sampling(self) -> dict[str, Any]:
        """The arguments of `SamplingParams` that the request gives; those of the subclass too."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    def field_of(self, parameter: str | None) -> str | None:
        """The field that gave a parameter."""
        return parameter


class CompletionRequest(GenerationRequest):
    """A body of /v1/completions. Text is never read as control tokens; send ids for those."""

    prompt: Prompt
    logprobs: int | None = Field(
        None, description="Report each token's logprob and so many of the likeliest."
    )
    include_stop_str_in_output: bool | None = None


class ChatRequest(GenerationRequest):
    """A body of /v1/chat/completions."""

    messages: list[Any] = Field(json_schema_extra={"items": {"type": "object"}})
    max_completion_tokens: int | None = Field(None, description="Goes before max_tokens.")
    logprobs: bool | None = Field(None, description="Report each token's logprob.")
    top_logprobs: int | None = Field(
        None, description="Also those of so many of the likeliest tokens."
    )
    thinking: bool | dict[str, Any] | None = Field(None, description="type, effort, keep.")
    reasoning_effort: str | None = Field(None, description="none, low, high or max.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="thinking, enable_thinking, thinking_effort, reasoning_effort."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if given.pop("logprobs", False):
            given["logprobs"] = self.top_logprobs or 0
        return given

    def field_of(self, parameter: str | None) -> str | None:
        if parameter == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs"}.get(parameter or "", parameter)


# Known fields that cannot be served yet, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
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
NOT_SERVED_COMPLETION: dict[str, tuple] = NOT_SERVED | {"suffix": ("",)}
NOT_SERVED_CHAT: dict[str, tuple] = NOT_SERVED | {
    "audio": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "prediction": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
LORA = ("lora_request", "lora_path", "lora_name", "lora_int_id", "adapter", "adapter_id")
# Fields that say something about the client or its account, or have no meaning for K3.
WITHOUT_EFFECT = frozenset(
    {
        "add_special_tokens",  # K3 prompts have none
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
    for name in LORA:
        if name in fields:
            raise RequestError(f"{name}: LoRA is not supported yet", field=name)
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
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
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
