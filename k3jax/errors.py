"""The exceptions that k3jax raises on purpose.

Every message says what was wrong, which field, file or tensor it concerns, and what to do about it.
"""


class K3Error(Exception):
    """Base of every error that k3jax raises on purpose."""


class ConfigError(K3Error):
    """A configuration, flag or set of settings that contradicts itself or is not supported."""


class CheckpointError(K3Error):
    """A checkpoint or tokenizer that cannot be used as it stands.

    `file` and `tensor` name the culprit where there is one; both are part of the message.
    """

    def __init__(self, message: str, *, file: object = None, tensor: str | None = None):
        self.file = None if file is None else str(file)
        self.tensor = tensor
        where = ", ".join(
            text
            for text in (
                f"file {self.file}" if self.file else "",
                f"tensor {tensor}" if tensor else "",
            )
            if text
        )
        super().__init__(f"{message} ({where})" if where else message)


class RequestError(K3Error):
    """A request that is refused before any work is done for it; `field` names the part at fault."""

    def __init__(self, message: str, *, field: str | None = None):
        self.field = field
        super().__init__(message)


class EngineError(K3Error):
    """The engine itself failed: a device error that repeats, or a broken invariant."""


class EngineClosedError(EngineError):
    """The engine takes no more requests, or gave this one up, because it is shutting down."""
