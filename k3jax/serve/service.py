"""What is served: the worker, the tokenizer, the names; and how a request becomes a job."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3jax.chat.parse import StreamParser
from k3jax.chat.render import render
from k3jax.chat.tokenizer import Tokenizer
from k3jax.engine.request import SamplingParams, show
from k3jax.errors import CheckpointError, RequestError
from k3jax.serve.limits import Limits
from k3jax.serve.outputs import Output, TextReader
from k3jax.serve.protocol import (
    Answer,
    ChatAnswer,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    GenerationRequest,
    Problem,
)
from k3jax.serve.worker import Worker

DEFAULT_COMPLETION_TOKENS = 16  # as vLLM; a chat may take what the context leaves


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json says."""

    sampling: dict[str, Any] = field(default_factory=dict)  # for fields that a request leaves out
    eos_ids: frozenset[int] = frozenset()

    @staticmethod
    def read(folder: str | Path) -> "GenerationDefaults":
        """Reads the file of a checkpoint folder, where there is one."""
        file = Path(folder) / "generation_config.json"
        if not file.exists():
            return GenerationDefaults()
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            names = ("temperature", "top_p", "top_k", "min_p")
            sampling = {name: content[name] for name in names if content.get(name) is not None}
            eos = content.get("eos_token_id")
            checks = {**sampling, "stop_token_ids": [eos] if isinstance(eos, int) else eos}
            checked = SamplingParams(**checks)
        except (ValueError, AttributeError, RecursionError):
            raise CheckpointError("not a JSON object", file=file) from None
        except RequestError as error:
            message = str(error).replace("stop_token_ids", "eos_token_id")
            raise CheckpointError(message, file=file) from None
        return GenerationDefaults(sampling, frozenset(checked.stop_token_ids))


@dataclass(frozen=True)
class Service:
    """Everything the endpoints need."""

    worker: Worker
    tokenizer: Tokenizer | None  # None: the checkpoint has none, requests speak token ids
    names: tuple[str, ...]  # of the model; the first is the one that is shown
    description: str
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    limits: Limits = field(default_factory=Limits)
    seeds: random.Random | None = None  # for requests without a seed; None lets the model draw
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.worker.generator.max_model_len

    def check_vocabulary(self) -> None:
        """Refuses a tokenizer that writes ids which the model does not have."""
        vocab_size = self.worker.generator.vocab_size
        if self.tokenizer is not None and self.tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, the model only {vocab_size}: "
                "they do not belong together",
                file="tiktoken.model",
            )

    def prepare_completion(self, request: CompletionRequest) -> tuple[list[Output], Answer]:
        """The outputs of a completions request, one for each prompt."""
        model = self._model_name(request)
        self._check(request)
        outputs = []
        for index, prompt_ids in enumerate(self._prompts(request.prompt)):
            params = self._params(request, len(prompt_ids), "prompt", DEFAULT_COMPLETION_TOKENS)
            reader = TextReader(
                self.tokenizer, params, skip_special=request.skip_special_tokens is not False
            )
            outputs.append(Output(prompt_ids, params, self._stop_ids(params), reader, index))
        return outputs, CompletionAnswer(request, model, outputs)

    def prepare_chat(self, request: ChatRequest) -> tuple[list[Output], Answer]:
        """The output of a chat request."""
        model = self._model_name(request)
        if self.tokenizer is None:
            raise _no_tokenizer("chat", "messages")
        self._check(request)
        self.limits.check_count("messages", request.messages, self.limits.messages)
        for index, message in enumerate(request.messages):
            if isinstance(message, dict) and message.get("tools"):
                name = f"messages[{index}].tools"
                raise RequestError(f"{name} is not served yet", field=name)
        try:
            rendered = render(
                request.messages,
                tokenizer=self.tokenizer,
                thinking=request.thinking,
                reasoning_effort=request.reasoning_effort,
                chat_template_kwargs=request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                max_tokens=self.max_model_len,
            )
        except RecursionError:
            raise RequestError("messages are nested too deeply", field="messages") from None
        params = self._params(request, len(rendered.token_ids), "messages", None)
        parser = StreamParser(
            self.tokenizer,
            channel=rendered.channel,
            report_tool_calls=False,
            stop=params.stop,
        )
        outputs = [Output(rendered.token_ids, params, self._stop_ids(params), parser)]
        return outputs, ChatAnswer(request, model, outputs)

    # -- parts of a request

    def _model_name(self, request: GenerationRequest) -> str:
        if request.model is None:
            return self.names[0]
        if request.model not in self.names:
            raise unknown_model(request.model)
        return request.model

    def _check(self, request: GenerationRequest) -> None:
        self.limits.check_stops(request.stop, request.stop_token_ids)
        if request.stop and self.tokenizer is None:
            raise _no_tokenizer("stop strings", "stop")

    def _params(
        self, request: GenerationRequest, prompt_len: int, prompt: str, default: int | None
    ) -> SamplingParams:
        room = self.max_model_len - prompt_len
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; the context of {self.max_model_len} must "
                "hold it and at least one more",
                field=prompt,
            )
        field, max_tokens = "max_tokens", request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            field, max_tokens = "max_completion_tokens", request.max_completion_tokens
        given: dict[str, Any] = {"max_tokens": max_tokens}
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"):
            given[name] = getattr(request, name)
        given |= {"stop": request.stop, "stop_token_ids": request.stop_token_ids}
        given = self.defaults.sampling | {k: v for k, v in given.items() if v is not None}
        given.setdefault("max_tokens", min(default or room, room))
        if self.seeds is not None:
            given.setdefault("seed", self.seeds.getrandbits(63))
        try:
            params = SamplingParams(**given)
        except RequestError as error:
            if error.field == "max_tokens":
                message = str(error).replace("max_tokens", field, 1)
                raise RequestError(message, field=field) from None
            raise
        if params.max_tokens > room:
            raise RequestError(
                f"{field} is {params.max_tokens}, but the prompt of {prompt_len} tokens leaves "
                f"{room} of the context of {self.max_model_len}",
                field=field,
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        return params

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stops = frozenset(params.stop_token_ids)
        if params.ignore_eos:
            return stops
        return stops | (
            self.defaults.eos_ids if self.tokenizer is None else self.tokenizer.stop_token_ids
        )

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """The prompts as ids: of one text, several, one list of ids, or several."""
        if isinstance(prompt, str) or (
            isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)
        ):
            return [self._prompt(prompt, "prompt")]
        if not isinstance(prompt, list):
            raise RequestError("prompt must be text, token ids, or a list of these", field="prompt")
        if not prompt:
            raise RequestError("prompt is empty", field="prompt")
        self.limits.check_count("prompt", prompt, self.limits.prompts)
        return [self._prompt(item, f"prompt[{at}]") for at, item in enumerate(prompt)]

    def _prompt(self, prompt: Any, name: str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise _no_tokenizer("text", "prompt")
            if self.tokenizer.min_tokens(prompt) >= self.max_model_len:
                raise RequestError(
                    f"{name} fills the context of {self.max_model_len} tokens", field="prompt"
                )
            prompt_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list):
            prompt_ids = prompt
            self._check_ids("prompt", prompt_ids)
        else:
            raise RequestError(f"{name} must be text or a list of token ids", field="prompt")
        if not prompt_ids:
            raise RequestError(f"{name} is empty", field="prompt")
        return prompt_ids

    def _check_ids(self, field: str, token_ids: Sequence[Any]) -> None:
        vocab_size = self.worker.generator.vocab_size
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{field}: {show(token_id)} is not a token id in 0..{vocab_size - 1}",
                    field=field,
                )


def unknown_model(name: str) -> Problem:
    """The answer to a request for a model that is not served."""
    return Problem(
        404,
        f"the model {name!r:.200} is not served here: see /v1/models",
        kind="not_found_error",
        code="model_not_found",
        param="model",
    )


def _no_tokenizer(what: str, field: str) -> RequestError:
    return RequestError(
        f"{what} cannot be served: the checkpoint has no tokenizer files (tiktoken.model, "
        "tokenizer_config.json). Send token ids to /v1/completions",
        field=field,
    )
