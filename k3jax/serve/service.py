"""What is served: the engine, its inputs, the names; and how a request gets into the engine."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3jax.chat.render import Rendered, render
from k3jax.engine.async_engine import AsyncEngine, Stream
from k3jax.engine.inputs import Inputs
from k3jax.engine.output import Output
from k3jax.engine.request import RequestOptions, SamplingParams
from k3jax.errors import RequestError
from k3jax.serve.answers import Answer, ChatAnswer, CompletionAnswer
from k3jax.serve.limits import Limits
from k3jax.serve.problems import Problem, queue_full, shutting_down, unknown_model
from k3jax.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16  # as vLLM; a chat may take what the context leaves


@dataclass(frozen=True)
class Prepared:
    """A request whose outputs can be submitted, and what will tell of them."""

    outputs: Sequence[Output]
    requests: Sequence[Any]  # what `engine.prepare` made of each output
    answer: Answer
    stream: bool


@dataclass(frozen=True)
class Service:
    """Everything the endpoints need. `prepare` is for any thread, the rest for the event loop."""

    engine: AsyncEngine
    inputs: Inputs
    names: tuple[str, ...]  # of the model; the first is the one that is shown
    description: str
    max_waiting: int = 64  # outputs; while so many wait, requests are refused
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.inputs.max_model_len

    def check_room(self) -> None:
        """Raises the `Problem` with which a request would be refused now."""
        if not self.engine.alive:
            raise Problem(
                503,
                "the engine has ended; the server's log has the reason",
                kind="service_unavailable_error",
                code="engine_ended",
            )
        if not self.engine.ready:
            raise shutting_down()
        if self.engine.num_waiting >= self.max_waiting:
            raise queue_full(self.max_waiting)

    def submit(self, prepared: Prepared) -> Stream:
        """Starts a request: all of its outputs at once."""
        self.check_room()
        return self.engine.submit_prepared(prepared.outputs, prepared.requests)

    def prepare(self, request: GenerationRequest) -> Prepared:
        """Reads the prompts and checks everything; the prompts' hashes are made here too."""
        name = self._model_name(request)
        with _fields_of(request):
            answer: type[Answer] = ChatAnswer
            if isinstance(request, ChatRequest):
                outputs = self._chat_outputs(request)
            else:
                assert isinstance(request, CompletionRequest)
                outputs, answer = self._completion_outputs(request), CompletionAnswer
            for index, output in enumerate(outputs):
                output.index = index
            options = _options(request)
            requests = [self.engine.engine.prepare(output, *options) for output in outputs]
        told = answer(request, name, outputs, self.inputs.tokenizer)
        return Prepared(outputs, requests, told, bool(request.stream))

    # Parts of a request.

    def _model_name(self, request: GenerationRequest) -> str:
        if request.model is None:
            return self.names[0]
        if request.model not in self.names:
            raise unknown_model(request.model)
        return request.model

    def _completion_outputs(self, request: CompletionRequest) -> list[Output]:
        if isinstance(request.prompt, list) and not _is_ids(request.prompt):
            self.limits.check_count("prompt", request.prompt, self.limits.prompts)
        outputs: list[Output] = []
        for prompt_ids in (prompts := self.inputs.prompts(request.prompt)):
            params = self._params(request, len(prompt_ids), DEFAULT_COMPLETION_TOKENS)
            self.limits.check_outputs(len(prompts), params.n)
            outputs += self.inputs.outputs(prompt_ids, params)
        return outputs

    def _chat_outputs(self, request: ChatRequest) -> list[Output]:
        if self.inputs.tokenizer is None:
            raise self.inputs.no_tokenizer("chat", "messages")
        self.limits.check_count("messages", request.messages, self.limits.messages)
        rendered = self._render(request)
        params = self._params(request, len(rendered.token_ids), None)
        return self.inputs.chat_outputs(rendered, params, report_tool_calls=False)

    def _render(self, request: ChatRequest) -> Rendered:
        for index, message in enumerate(request.messages):
            if isinstance(message, dict) and message.get("tools"):
                name = f"messages[{index}].tools"
                raise RequestError(f"{name} is not served yet", field=name)
        try:
            return render(
                request.messages,
                tokenizer=self.inputs.tokenizer,
                thinking=request.thinking,
                reasoning_effort=request.reasoning_effort,
                chat_template_kwargs=request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                max_tokens=self.max_model_len,
            )
        except RecursionError:
            raise RequestError("messages are nested too deeply", field="messages") from None

    def _params(
        self, request: GenerationRequest, prompt_len: int, default: int | None
    ) -> SamplingParams:
        room = self.max_model_len - prompt_len
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; the context of {self.max_model_len} must "
                "hold it and at least one more",
                field="prompt",
            )
        given = {"max_tokens": min(default or room, room), **self.inputs.defaults.sampling}
        return SamplingParams(**(given | request.sampling()))


def _is_ids(prompt: list) -> bool:
    return bool(prompt) and not isinstance(prompt[0], str | list)


def _options(request: GenerationRequest) -> tuple:
    """What else the engine is to know of a request: at most one `RequestOptions`."""
    if request.priority is None and request.cache_salt is None:
        return ()
    return (RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),)


@contextlib.contextmanager
def _fields_of(request: GenerationRequest) -> Iterator[None]:
    """Errors speak of the request's fields, where those have other names than parameters."""
    try:
        yield
    except RequestError as error:
        field = request.field_of(error.field)
        if field == error.field:
            raise
        message = str(error)
        if error.field is not None and field is not None and error.field != "prompt":
            message = message.replace(error.field, field, 1)
        raise RequestError(message, field=field) from None
