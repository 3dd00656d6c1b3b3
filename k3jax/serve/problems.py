"""Answers other than the one that was asked for, as OpenAI's error objects."""

from collections.abc import Mapping
from typing import Any

from k3jax.engine.output import Output
from k3jax.errors import EngineClosedError, RequestError


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
    if isinstance(error, EngineClosedError):
        return shutting_down()
    return Problem(
        500, "the server failed to answer; its log has the reason", kind="internal_server_error"
    )


def problem_of_output(output: Output) -> Problem:
    """The answer to a request one of whose outputs ended before its time."""
    if output.finish_reason == "abort":
        return Problem(
            503, "the request was aborted", kind="service_unavailable_error", code="aborted"
        )
    message = output.error or "the generation failed"
    return Problem(500, message, kind="internal_server_error", code="generation_failed")


def shutting_down() -> Problem:
    """The answer to requests that come, or are still there, when the server ends."""
    return Problem(
        503,
        "the server is shutting down",
        kind="service_unavailable_error",
        code="shutting_down",
        headers={"Retry-After": "1"},
    )


def queue_full(max_waiting: int) -> Problem:
    """The answer to requests that would wait behind too many others."""
    return Problem(
        429,
        f"{max_waiting} answers are waiting already: try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
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
