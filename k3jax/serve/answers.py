"""The response objects of the OpenAI endpoints, whole or as the chunks of a stream."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from k3jax.chat.parse import Delta, Message
from k3jax.chat.tokenizer import Tokenizer
from k3jax.engine.output import Output, OutputStep
from k3jax.serve.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, prompt_logprobs
from k3jax.serve.protocol import GenerationRequest


class Answer:
    """The response objects of one request; subclasses know the shape of their endpoint."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        outputs: Sequence[Output],
        tokenizer: Tokenizer | None,
    ):
        self._request = request
        self._outputs = outputs
        self._names = TokenNames(tokenizer)
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
        choices = [self.choice(output) for output in self._outputs]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage()}

    def chunks(self, step: OutputStep) -> Iterator[dict[str, Any]]:
        """The chunks of a stream that tell of one step."""
        for choice in self.step_choices(step):
            yield self._chunk([choice], self.usage() if self._continuous_usage else None)

    def last_chunk(self) -> dict[str, Any] | None:
        """The chunk behind all choices, if usage was asked for."""
        return self._chunk([], self.usage()) if self._include_usage else None

    def usage(self) -> dict[str, Any]:
        """Tokens so far; those of a prompt count once, however many answers it gets."""
        firsts = self._outputs[:: self._request.n or 1]
        prompt = sum(len(output.prompt_ids) for output in firsts)
        completion = sum(len(output.token_ids) for output in self._outputs)
        cached = sum(output.num_cached_tokens or 0 for output in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def choice(self, output: Output) -> dict[str, Any]:
        """One finished choice."""
        raise NotImplementedError

    def step_choices(self, step: OutputStep) -> Iterator[dict[str, Any]]:
        """What a step adds to its choice."""
        raise NotImplementedError

    def _about_prompt(self, output: Output) -> dict[str, Any]:
        """What was asked to be told of the prompt."""
        told: dict[str, Any] = {}
        if self._request.return_token_ids:
            told["prompt_token_ids"] = output.prompt_ids
        if output.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._names)
        return told

    def _chunk(self, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._include_usage or self._continuous_usage:
            chunk["usage"] = usage
        return chunk


class CompletionAnswer(Answer):
    """/v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        outputs: Sequence[Output],
        tokenizer: Tokenizer | None,
    ):
        super().__init__(request, model, outputs, tokenizer)
        skip = request.skip_special_tokens is not False
        self._logprobs = [CompletionLogprobs(tokenizer, skip_special_tokens=skip) for _ in outputs]

    def choice(self, output: Output) -> dict[str, Any]:
        whole = OutputStep(
            output.index,
            True,
            output.token_ids,
            Delta(content=output.text),
            output.finish_reason,
            output.stop_reason,
            output.logprobs,
        )
        return self._choice(whole)

    def step_choices(self, step: OutputStep) -> Iterator[dict[str, Any]]:
        is_asked = self._request.return_token_ids or (
            step.is_first and self._request.prompt_logprobs is not None
        )
        if step.delta.content or step.finish_reason or step.logprobs or is_asked:
            yield self._choice(step)

    def _choice(self, step: OutputStep) -> dict[str, Any]:
        logprobs = None
        if step.logprobs is not None:
            logprobs = self._logprobs[step.index].feed(step.logprobs)
        choice: dict[str, Any] = {
            "index": step.index,
            "text": step.delta.content,
            "logprobs": logprobs,
            "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = step.token_ids
        if step.is_first:
            choice |= self._about_prompt(self._outputs[step.index])
        return choice


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        return super().whole() | self._about_prompt(self._outputs[0])

    def usage(self) -> dict[str, Any]:
        reasoning = sum(output.reasoning_tokens for output in self._outputs)
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": reasoning}}

    def choice(self, output: Output) -> dict[str, Any]:
        choice = self._choice(
            output.index,
            {"message": message_object(output.message())},
            output.finish_reason,
            output.stop_reason,
        )
        return choice | self._about_tokens(output.token_ids, output.logprobs)

    def chunks(self, step: OutputStep) -> Iterator[dict[str, Any]]:
        chunks = super().chunks(step)
        if step.is_first and step.index == 0:
            yield next(chunks) | self._about_prompt(self._outputs[0])
        yield from chunks

    def step_choices(self, step: OutputStep) -> Iterator[dict[str, Any]]:
        if step.is_first:
            yield self._choice(step.index, {"delta": {"role": "assistant", "content": ""}})
        told = self._about_tokens(step.token_ids, step.logprobs)
        if step.delta or (step.token_ids and told):
            yield self._choice(step.index, {"delta": delta_object(step.delta)}) | told
        if step.finish_reason:
            yield self._choice(step.index, {"delta": {}}, step.finish_reason, step.stop_reason)

    def _choice(
        self, index: int, said: dict, finish: str | None = None, stop: int | str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        choice["stop_reason"] = stop
        if self._request.return_token_ids:
            choice["token_ids"] = []
        return choice

    def _about_tokens(self, token_ids: list[int], logprobs: list | None) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._request.return_token_ids:
            told["token_ids"] = token_ids
        if logprobs is not None:
            told["logprobs"] = chat_logprobs(logprobs, self._names)
        return told


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
