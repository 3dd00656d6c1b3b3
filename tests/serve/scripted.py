"""A server in a thread around a scripted model, so that these tests need no jax."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from k3jax.chat.tokenizer import Tokenizer, shipped_tokenizer
from k3jax.serve import server
from k3jax.serve.limits import Limits
from k3jax.serve.service import GenerationDefaults, Service
from k3jax.serve.worker import Worker

TINY = shipped_tokenizer()


def ids_of(marked: str) -> list[int]:
    """Ids of text in which ⟦name⟧ stands for a control token."""
    ids = []
    for index, part in enumerate(marked.replace("⟧", "⟦").split("⟦")):
        ids += [TINY.special_ids[f"<|{part}|>"]] if index % 2 else TINY.encode(part)
    return ids


@dataclass
class ScriptedModel:
    """Answers every prompt with the same ids, then `filler` for ever."""

    answer: list[int] = field(default_factory=list)
    filler: int = 120  # x
    step: int = 1  # ids of one step
    step_s: float = 0.0  # time of one step
    max_model_len: int = 2_000
    vocab_size: int = TINY.vocab_size
    fail_after: int | None = None  # steps until it raises
    prompts: list[list[int]] = field(default_factory=list)
    params: list = field(default_factory=list)
    running: bool = False
    closed_early: int = 0

    def stream(self, prompt_ids, params, stop_token_ids) -> Iterator[list[int]]:
        self.prompts.append(prompt_ids)
        self.params.append(params)
        return self._stream(params, stop_token_ids)

    def _stream(self, params, stop_token_ids):
        self.running, finished = True, False
        try:
            ids: list[int] = []
            while len(ids) < params.max_tokens:
                new: list[int] = []
                while len(new) < self.step and len(ids) + len(new) < params.max_tokens:
                    at = len(ids) + len(new)
                    new.append(self.answer[at] if at < len(self.answer) else self.filler)
                    if new[-1] in stop_token_ids:
                        break
                time.sleep(self.step_s)
                if self.fail_after is not None and len(ids) >= self.fail_after:
                    raise RuntimeError("secret detail of the failure")
                ids += new
                finished = new[-1] in stop_token_ids or len(ids) == params.max_tokens
                yield new
                if finished:
                    return
        finally:
            self.closed_early += not finished
            self.running = False


@dataclass
class Running:
    """A server that listens."""

    url: str
    model: ScriptedModel
    service: Service
    client: httpx.Client

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
    model: ScriptedModel,
    *,
    tokenizer: Tokenizer | None = TINY,
    max_waiting: int = 8,
    limits: Limits | None = None,
    defaults: GenerationDefaults | None = None,
    **service_fields,
) -> Iterator[Running]:
    worker = Worker(lambda: model, max_waiting)
    worker.start()
    service = Service(
        worker,
        tokenizer,
        names=("scripted", "alias"),
        description="A scripted model.",
        defaults=defaults or GenerationDefaults(),
        limits=limits or Limits(),
        **service_fields,
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
            yield Running(url, model, service, client)
    finally:
        uvicorn_server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
