"""The HTTP endpoints."""

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from k3jax.engine.async_engine import Stream
from k3jax.engine.output import OutputStep
from k3jax.errors import EngineError, RequestError
from k3jax.serve.answers import Answer
from k3jax.serve.problems import Problem, problem_of, problem_of_output, unknown_model
from k3jax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)
from k3jax.serve.service import Prepared, Service

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0  # a stream that is silent for so long sends a comment
PREPARING_THREADS = 2  # read JSON and tokenise, which can take seconds for long prompts


class Json(Response):
    """A JSON response of anything that `dump` takes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def create_app(service: Service) -> FastAPI:
    """The application that serves `service`."""
    app = FastAPI(
        title="k3jax",
        version=version(),
        docs_url=None,  # the page would load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.service = service
    app.state.preparing = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="prepare")

    for error in (Problem, RequestError, EngineError, HTTPException, Exception):
        app.add_exception_handler(error, _error_response)
    app.get("/health")(health)
    app.get("/ready")(ready)
    app.get("/version")(show_version)
    app.get("/v1/models")(list_models)
    app.get("/v1/models/{name:path}")(show_model)
    app.post("/v1/completions", openapi_extra=_body(CompletionRequest))(completions)
    app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))(chat_completions)
    return app


def _body(kind: type[GenerationRequest]) -> dict[str, Any]:
    """What the OpenAPI document says about a body that we parse ourselves."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version("k3jax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.preparing.shutdown(wait=False, cancel_futures=True)


async def health(request: Request) -> Response:
    """Is the process, and the thread of the engine, alive?"""
    alive = request.app.state.service.engine.alive
    return Json({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)


async def ready(request: Request) -> Response:
    """Would a request be taken now?"""
    is_ready = request.app.state.service.engine.ready
    return Json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def show_version() -> Response:
    """The version of the server."""
    return Json({"version": version()})


async def list_models(request: Request) -> Response:
    """The served model under each of its names."""
    service = request.app.state.service
    models = [_model_object(service, name) for name in service.names]
    return Json({"object": "list", "data": models})


async def show_model(request: Request, name: str) -> Response:
    """The served model."""
    service = request.app.state.service
    if name not in service.names:
        raise unknown_model(name)
    return Json(_model_object(service, name))


def _model_object(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "k3jax",
        "max_model_len": service.max_model_len,
        "description": service.description,
    }


async def completions(request: Request) -> Response:
    """Continues a text or a list of token ids."""
    return await _answer(request, CompletionRequest)


async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    return await _answer(request, ChatRequest)


async def _answer(request: Request, kind: type[GenerationRequest]) -> Response:
    service: Service = request.app.state.service
    body = await _read_body(request, service.limits.body_bytes)
    service.check_room()

    def prepare() -> Prepared:
        return service.prepare(parse_request(body, kind))

    loop = asyncio.get_running_loop()
    prepared = await loop.run_in_executor(request.app.state.preparing, prepare)
    answer, stream = prepared.answer, service.submit(prepared)
    watch = asyncio.create_task(_cancel_on_disconnect(request, service, stream))
    if not prepared.stream:
        try:
            while await _next(stream) is not None:
                pass
        finally:
            watch.cancel()
            service.engine.cancel(stream)
        if stream.disconnected:
            return Response(status_code=499)
        # In a thread: an answer with many logprobs takes long to write.
        content = await asyncio.to_thread(lambda: dump(answer.whole()))
        return Response(content, media_type=Json.media_type)

    # The status is sent with the first step, so that an early error can still have its own.
    first = None
    try:
        with contextlib.suppress(TimeoutError):
            first = await _next(stream, KEEP_ALIVE_S)
    except BaseException:
        watch.cancel()
        service.engine.cancel(stream)
        raise
    if stream.disconnected:
        return Response(status_code=499)
    return StreamingResponse(
        _events(service, stream, first, answer, watch),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )


async def _next(stream: Stream, timeout_s: float | None = None) -> OutputStep | None:
    """The next step, None behind the last one or without a client. One output that ends before its
    time ends the request with a `Problem`."""
    step = await stream.next(timeout_s)
    if step is None or stream.disconnected:
        return None
    if step.finish_reason in ("abort", "error"):
        raise problem_of_output(stream.outputs[step.index])
    return step


async def _read_body(request: Request, limit: int) -> bytes:
    body = bytearray()
    too_large = Problem(
        413,
        f"the body is larger than {limit} bytes",
        kind="invalid_request_error",
        code="request_too_large",
        headers={"Connection": "close"},  # the rest of it will not be read
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise Problem(499, "the client is gone", kind="client_closed_request") from None
    return bytes(body)


async def _cancel_on_disconnect(request: Request, service: Service, stream: Stream) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.disconnected = True
    service.engine.cancel(stream)


async def _events(
    service: Service, stream: Stream, first: OutputStep | None, answer: Answer, watch: asyncio.Task
) -> AsyncIterator[bytes]:
    """The server-sent events of a stream, from its first step on."""
    step = first
    try:
        while True:
            if step is not None:
                write = functools.partial(_write, answer, step)
                # The first step tells of the prompt, which may be much.
                events = await asyncio.to_thread(write) if step.is_first else write()
                for event in events:
                    yield event
            try:
                step = await _next(stream, KEEP_ALIVE_S)
            except TimeoutError:
                step = None
                yield b": still working\n\n"
                continue
            if step is None:
                break
        if (usage := answer.last_chunk()) is not None:
            yield _event(usage)
    except Exception as error:
        if not isinstance(error, Problem | EngineError):  # those of the engine are in the log
            logger.exception("a stream failed")
        yield _event(problem_of(error).body())
    finally:
        watch.cancel()
        service.engine.cancel(stream)
    yield b"data: [DONE]\n\n"


def _write(answer: Answer, step: OutputStep) -> list[bytes]:
    return [_event(chunk) for chunk in answer.chunks(step)]


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + dump(content) + b"\n\n"


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such route or method
        message = f"{request.method} {request.url.path:.200}: {error.detail}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        problem = Problem(error.status_code, message, kind=kind, headers=error.headers)
    else:
        problem = problem_of(error)
    return Json(problem.body(), problem.status, headers=problem.headers)


def dump(content: Any) -> bytes:
    """Compact UTF-8 JSON of anything, half surrogate pairs included."""
    try:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(content, separators=(",", ":")).encode()
