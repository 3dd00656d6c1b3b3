"""The offline engine: prompts in, finished outputs out, with vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from k3jax.chat.parse import Message
from k3jax.chat.render import Rendered, render
from k3jax.chat.tokenizer import Tokenizer
from k3jax.engine.config import EngineConfig
from k3jax.engine.engine import DEFAULT_OPTIONS, Engine
from k3jax.engine.inputs import GenerationDefaults, Inputs
from k3jax.engine.output import Output, OutputStep
from k3jax.engine.request import RequestOptions, SamplingParams
from k3jax.engine.scheduler import TokenLogprobs
from k3jax.errors import EngineError, RequestError
from k3jax.models.k3 import K3Model

PROGRESS_FROM = 8  # prompts; fewer show no progress bar unless asked to


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position; rank 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request. logprobs: for each token, by token id, the chosen one first."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    message: Message | None = None  # of a chat: reasoning, content, tool calls
    weight_versions: list[int | str] = field(default_factory=list)  # of each token's weights


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. prompt_logprobs: for each prompt token, None for the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None


class LLM:
    """A model that generates for batches of prompts.

        llm = k3jax.LLM("path", max_num_seqs=16)
        for output in llm.generate(["Hello", "Once"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    model: a checkpoint folder, or a K3Model (then token ids only, unless `tokenizer` is given).
    engine_args: fields of `EngineConfig`. Used from one thread; `AsyncEngine` is its twin for many.
    """

    def __init__(
        self,
        model: str | Path | K3Model,
        *,
        tokenizer: Tokenizer | None = None,
        mesh: jax.sharding.Mesh | None = None,
        **engine_args: Any,
    ):
        config = EngineConfig(**engine_args)
        if isinstance(model, K3Model):
            self.engine = Engine(model, config)
            self.inputs = Inputs(
                tokenizer,
                GenerationDefaults(),
                self.engine.vocab_size,
                self.engine.max_model_len,
            )
            self.inputs.check_vocabulary()
        else:
            self.engine = Engine.from_pretrained(model, config, mesh=mesh)
            self.inputs = Inputs.of_folder(
                model, self.engine.vocab_size, self.engine.max_model_len, tokenizer
            )
        self._num_requests = 0
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Text to ids and back; None if the checkpoint has none."""
        return self.inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for."""
        return SamplingParams(**self.inputs.defaults.sampling)

    def generate(
        self,
        prompts: str | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] = DEFAULT_OPTIONS,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt: a text, or a list of token ids; or a list of these.

        sampling_params, options: one for all or one for each. use_tqdm: show a progress bar; by
        default for 8 prompts and more. Nothing is computed if any request cannot be served.
        """
        given = _prompt_list(prompts)
        each = _each(sampling_params or self.get_default_sampling_params(), len(given))
        groups = []
        for at, (prompt, params) in enumerate(zip(given, each, strict=True)):
            ids = self.inputs.prompt(prompt, f"prompt[{at}]" if len(given) > 1 else "prompt")
            groups.append(self.inputs.outputs(ids, params))
        named = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._run(groups, named, options, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict] | None = None,
        options: RequestOptions | Sequence[RequestOptions] = DEFAULT_OPTIONS,
        use_tqdm: bool | None = None,
        **render_options: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of conversations.

        tools, render_options: as `k3jax.chat.render` takes them. `outputs[0].message` is the parsed
        answer, `.text` its visible content. Without `max_tokens` in sampling_params' place an
        answer may fill the context.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        if not conversations:
            raise RequestError("there is no conversation", field="messages")
        rendered: list[Rendered] = [
            render(
                conversation,
                tools,
                tokenizer=self._require_tokenizer(),
                max_tokens=self.engine.max_model_len,
                **render_options,
            )
            for conversation in conversations
        ]
        if sampling_params is None:
            each = [
                SamplingParams(
                    max_tokens=max(1, self.engine.max_model_len - len(one.token_ids)),
                    **self.inputs.defaults.sampling,
                )
                for one in rendered
            ]
        else:
            each = _each(sampling_params, len(rendered))
        has_tools = bool(tools) and render_options.get("tool_choice") != "none"
        groups = [
            self.inputs.chat_outputs(one, params, report_tool_calls=has_tools)
            for one, params in zip(rendered, each, strict=True)
        ]
        return self._run(groups, [None] * len(groups), options, use_tqdm, is_chat=True)

    def update_weights(self, weights: Any, version: int | str | None = None) -> None:
        """Swaps the weights; see `Engine.update_weights`."""
        self.engine.update_weights(weights, version)

    def close(self) -> None:
        """Gives the device's memory back. The engine cannot be used after it."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def _run(
        self,
        groups: list[list[Output]],
        prompts: list[str | None],
        options: RequestOptions | Sequence[RequestOptions],
        use_tqdm: bool | None,
        *,
        is_chat: bool = False,
    ) -> list[RequestOutput]:
        if self._closed:
            raise EngineError("this LLM was closed")
        each = _each(options, len(groups))
        requests = [
            [self.engine.prepare(output, option) for output in group]
            for group, option in zip(groups, each, strict=True)
        ]
        show = len(groups) >= PROGRESS_FROM if use_tqdm is None else use_tqdm
        with tqdm(total=len(groups), desc="requests", disable=not show) as bar:

            def listen(group: list[Output]):
                def on_step(step: OutputStep) -> None:
                    if all(output.finish_reason is not None for output in group):
                        bar.update()

                return on_step

            try:
                for group, prepared in zip(groups, requests, strict=True):
                    listener = listen(group)
                    for request in prepared:
                        self.engine.add(request, listener)
                while self.engine.has_work:
                    self.engine.step()
            except BaseException:  # an interrupt too: the next call finds an idle engine
                for prepared in requests:
                    for request in prepared:
                        self.engine.abort(request)
                raise
        return [
            self._request_output(group, prompt, is_chat)
            for group, prompt in zip(groups, prompts, strict=True)
        ]

    def _request_output(
        self, group: list[Output], prompt: str | None, is_chat: bool
    ) -> RequestOutput:
        first = group[0]
        prompt_logprobs: list | None = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = [None, *map(self._logprobs, first.prompt_logprobs)]
        self._num_requests += 1
        return RequestOutput(
            request_id=str(self._num_requests - 1),
            prompt=prompt,
            prompt_token_ids=list(first.prompt_ids),
            prompt_logprobs=prompt_logprobs,
            outputs=[
                CompletionOutput(
                    index=output.index,
                    text=output.text,
                    token_ids=output.token_ids,
                    cumulative_logprob=output.cumulative_logprob,
                    logprobs=None
                    if output.logprobs is None
                    else list(map(self._logprobs, output.logprobs)),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                    message=output.message() if is_chat else None,
                    weight_versions=output.weight_versions,
                )
                for output in group
            ],
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
        )

    def _logprobs(self, found: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token, then the likeliest ones."""
        values = {found.token_id: Logprob(found.logprob, found.rank, self._text(found.token_id))}
        for rank, (token_id, logprob) in enumerate(found.top, start=1):
            values.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return values

    def _text(self, token_id: int) -> str | None:
        if self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode([token_id])

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise self.inputs.no_tokenizer("chat", "messages")
        return self.tokenizer


def _prompt_list(prompts: Any) -> list[Any]:
    """Each prompt as text or as a list of ids; the integers of NumPy as Python's."""
    if isinstance(prompts, str | dict):
        prompts = [prompts]
    if not hasattr(prompts, "__iter__") or isinstance(prompts, bytes):
        raise RequestError("prompt must be text, token ids, or a list of these", field="prompt")
    items = list(prompts)
    if not items:
        raise RequestError("prompt is empty", field="prompt")
    if not any(isinstance(item, str | dict) or hasattr(item, "__len__") for item in items):
        items = [items]
    return [_prompt(item) for item in items]


def _prompt(item: Any) -> Any:
    if isinstance(item, dict):  # vLLM's form
        item = item.get("prompt_token_ids", item.get("prompt"))
    if isinstance(item, str) or not hasattr(item, "__iter__"):
        return item
    return [token.item() if isinstance(token, np.integer) else token for token in item]


def _each(value: Any, count: int) -> list:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{len(value)} sampling_params or options for {count} prompts", field="sampling_params"
        )
    return list(value)
