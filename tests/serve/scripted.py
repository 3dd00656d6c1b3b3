"""A server in a thread around a scripted engine, so that these tests need no jax."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from k3jax.cache import check_cache_salt
from k3jax.chat.tokenizer import Tokenizer, shipped_tokenizer
from k3jax.engine.async_engine import AsyncEngine
from k3jax.engine.inputs import GenerationDefaults, Inputs, check_ids
from k3jax.engine.output import Output
from k3jax.engine.scheduler import TokenLogprobs
from k3jax.errors import RequestError
from k3jax.serve import server
from k3jax.serve.limits import Limits
from k3jax.serve.service import Service

TINY = shipped_tokenizer()


def ids_of(marked: str) -> list[int]:
    """Ids of text in which ⟦name⟧ stands for a control token."""
    ids = []
    for index, part in enumerate(marked.replace("⟧", "⟦").split("⟦")):
        ids += [TINY.special_ids[f"<|{part}|>"]] if index % 2 else TINY.encode(part)
    return ids


@dataclass(eq=False)
class ScriptedRequest:
    """An output on its way through a `ScriptedEngine`."""

    output: Output
    options: Any
    listener: Any = None
    num_steps: int = 0


@dataclass
class ScriptedEngine:
    """Answers every prompt with the same ids, then for ever with `filler`, which differs between
    the outputs of a request. It speaks to `AsyncEngine` as the real engine does."""

    answer: list[int] = field(default_factory=list)
    filler: int = 120  # x; y for the second output of a request
    step_tokens: int = 1  # ids that an output gets in a step
    step_s: float = 0.0  # time of one step
    max_num_seqs: int = 64  # more wait
    max_model_len: int = 2_000
    max_logprobs: int = 5
    vocab_size: int = TINY.vocab_size
    num_cached_tokens: int = 0
    fail_after: int | None = None  # steps until a request fails alone
    failing_prompt: list[int] | None = None  # that of the request; None for each
    abort_after: int | None = None  # steps until a request is aborted by the engine
    die_after: int | None = None  # steps until the engine fails
    prompts: list[list[int]] = field(default_factory=list)  # of all that was added
    params: list = field(default_factory=list)
    options: list = field(default_factory=list)
    waiting: list[ScriptedRequest] = field(default_factory=list)
    running: list[ScriptedRequest] = field(default_factory=list)
    num_aborted: int = 0
    most_running: int = 0
    num_steps: int = 0

    def prepare(self, output: Output, options: Any = None) -> ScriptedRequest:
        params = output.params
        check_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        params.check_vocabulary(self.vocab_size)
        if len(output.prompt_ids) + params.max_tokens > self.max_model_len:
            message = f"max_tokens={params.max_tokens} exceeds the context"
            raise RequestError(message, field="max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                raise RequestError(f"{name} exceeds {self.max_logprobs}", field=name)
        if options is not None:
            check_cache_salt(options.cache_salt)
        return ScriptedRequest(output, options)

    def add(self, request: ScriptedRequest, listener: Any) -> None:
        request.listener = listener
        self.prompts.append(request.output.prompt_ids)
        self.params.append(request.output.params)
        self.options.append(request.options)
        self.waiting.append(request)

    def abort(self, request: ScriptedRequest, reason: str = "abort") -> None:
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)
                self.num_aborted += 1
                request.listener(request.output.end(reason))

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_free_rows(self) -> int:
        return self.max_num_seqs - len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        self.most_running = max(self.most_running, len(self.running))
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.die_after is not None and self.num_steps > self.die_after:
            raise RuntimeError("secret detail of the failure")
        for request in list(self.running):
            step = self._advance(request)
            if step.finish_reason is not None:
                self.running.remove(request)
            request.listener(step)

    def _advance(self, request: ScriptedRequest):
        output, number = request.output, request.num_steps
        request.num_steps += 1
        fails = self.failing_prompt in (None, output.prompt_ids)
        if fails and number == self.fail_after:
            return output.end("error", "the numbers of the script are not finite")
        if number == self.abort_after:
            return output.end("abort")
        if number == 0:
            output.num_cached_tokens = self.num_cached_tokens
            if output.prompt_logprobs is not None:
                count = output.params.prompt_logprobs
                output.prompt_logprobs = [logprobs_of(i, count) for i in output.prompt_ids[1:]]
        start = len(output.token_ids)
        ids = [
            self.answer[at] if at < len(self.answer) else self.filler + output.index
            for at in range(start, start + self.step_tokens)
        ]
        count = output.params.logprobs
        return output.feed(ids, None if count is None else [logprobs_of(i, count) for i in ids])


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    """A token that is always the second likeliest, after A; then come B, C and so on."""
    likeliest = [(65, -0.5), (token_id, -1.0), (66, float("-inf")), (67, float("-inf"))]
    return TokenLogprobs(token_id, -1.0, 2, likeliest[:count])


@dataclass
class Running:
    """A server that listens."""

    url: str
    engine: ScriptedEngine
    service: Service
    client: httpx.Client
    server: Any

    def stop(self) -> None:
        """What a signal does."""
        self.server.should_exit = True

    def post(self, path: str, body=None, **kwargs) -> httpx.Response:
        if body is not None:
            kwargs["content"] = json.dumps(body)
        return self.client.post(path, **kwargs)

    def chat(self, **fields) -> httpx.Response:
        fields = {"messages": [{"role": "user", "content": "hi"}]} | fields
        return self.post("/v1/chat/completions", fields)

    def complete(self, **fields) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi"} | fields)

    def events(self, path: str, body: dict) -> list[dict]:
        """The chunks of a stream, which must end as the protocol says."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line and line[0] != ":"]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextlib.contextmanager
def serving(
    engine: ScriptedEngine,
    *,
    tokenizer: Tokenizer | None = TINY,
    defaults: GenerationDefaults | None = None,
    max_waiting: int = 8,
    limits: Limits | None = None,
) -> Iterator[Running]:
    async_engine = AsyncEngine(lambda: engine)
    async_engine.start()
    service = Service(
        async_engine,
        Inputs(
            tokenizer, defaults or GenerationDefaults(), engine.vocab_size, engine.max_model_len
        ),
        names=("scripted", "alias"),
        description="A scripted model.",
        max_waiting=max_waiting,
        limits=limits or Limits(),
    )
    sock = server._bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    uvicorn_server = server._Server(service)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [sock]})
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=20) as client:
            wait_until(lambda: uvicorn_server.started)
            yield Running(url, engine, service, client, uvicorn_server)
    finally:
        uvicorn_server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
