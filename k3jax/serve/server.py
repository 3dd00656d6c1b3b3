"""From flags to a running server."""

import asyncio
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import uvicorn

from k3jax.chat.tokenizer import Tokenizer, load_tokenizer
from k3jax.errors import ConfigError, K3Error
from k3jax.serve.app import create_app
from k3jax.serve.service import GenerationDefaults, Service
from k3jax.serve.worker import Generator, Worker

logger = logging.getLogger(__name__)

UNTRAINED_NAME = "k3jax-tiny"
UNTRAINED = (
    "UNTRAINED: a model of the Kimi K3 architecture with seeded random weights. Its answers are "
    "noise; it shows that the server works."
)
GRACE_S = 5.0  # what a running request gets when the server is asked to end


@dataclass(frozen=True)
class ServerConfig:
    """Serves a model over HTTP with the endpoints of the OpenAI API."""

    model: str | None = None  # folder of the checkpoint; without one, a tiny untrained model
    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # port to listen on; 0 takes a free one and logs it
    served_model_name: tuple[str, ...] = ()  # names that requests may use instead of the folder
    max_model_len: int | None = None  # most tokens of prompt and answer together; the model's own
    # limit if absent
    dtype: str = "auto"  # of weights and activations, for example bfloat16 or float32; auto takes
    # the checkpoint's
    seed: int | None = None  # makes requests without a seed of their own the same in every run
    max_waiting: int = 64  # requests that may wait for the one that runs; more are refused by 429

    def __post_init__(self):
        if self.model == "":
            raise ConfigError("--model is empty: name a checkpoint folder")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port {self.port} is not in 0..65535")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"--max-model-len {self.max_model_len} must be at least 2")
        if self.max_waiting < 0:
            raise ConfigError(f"--max-waiting {self.max_waiting} must not be negative")


@dataclass(frozen=True)
class ModelSource:
    """Where models come from, so that the server itself needs no checkpoint code."""

    default: Callable[[], str | Path]  # folder of the model that is served when none is named
    is_untrained: Callable[[str | Path], bool]  # a folder whose weights are random
    load: Callable[[ServerConfig, str], Generator]


def run(config: ServerConfig, source: ModelSource) -> int:
    """Serves until SIGINT or SIGTERM and returns the exit code.

    What a user can put right is one line on stderr and code 1; nothing listens before the model is
    loaded.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for name in ("jax", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupt)
    try:
        with _bind(config.host, config.port) as sock:
            return _serve(make_service(config, source), sock)
    except K3Error as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except _Interrupted as interrupted:
        # While a model loads. A thread that compiles cannot be joined, and the interpreter must
        # not be taken down under it.
        sys.stderr.flush()
        os._exit(128 + interrupted.signum)


class _Interrupted(BaseException):
    def __init__(self, signum: int):
        self.signum = signum


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise _Interrupted(signum)


def make_service(config: ServerConfig, source: ModelSource) -> Service:
    """Loads everything that is served; refuses what cannot be used with a `K3Error`."""
    path = str(source.default()) if config.model is None else config.model
    name = UNTRAINED_NAME if config.model is None else config.model
    defaults, tokenizer = GenerationDefaults(), None
    if Path(path).is_dir():  # if not, the loader says what is wrong with the path
        defaults, tokenizer = GenerationDefaults.read(path), _tokenizer(Path(path))
    worker = Worker(lambda: source.load(config, path), config.max_waiting)
    worker.start()
    service = Service(
        worker,
        tokenizer,
        names=config.served_model_name or (name,),
        description=UNTRAINED
        if source.is_untrained(path)
        else f"The checkpoint {Path(path).name}.",
        defaults=defaults,
        seeds=None if config.seed is None else random.Random(config.seed),
    )
    service.check_vocabulary()
    if tokenizer is None:
        logger.warning("no tokenizer files in %s: only completions of token ids", path)
    elif tokenizer.missing_chat_tokens:
        logger.warning(
            "the tokenizer lacks %s: completions, no chat", " ".join(tokenizer.missing_chat_tokens)
        )
    return service


def load_generator(config: ServerConfig, path: str) -> Generator:
    """The model of a checkpoint folder, compiled."""
    from k3jax.engine.compile_cache import enable_compile_cache  # imports jax
    from k3jax.generation import Generator as ModelGenerator

    enable_compile_cache()
    return ModelGenerator.from_pretrained(
        path,
        dtype=None if config.dtype == "auto" else config.dtype,
        max_model_len=config.max_model_len,
    )


def _tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if (folder / "tiktoken.model").exists() else None


def _bind(host: str, port: int) -> socket.socket:
    """Takes the address without listening yet, so that a taken one is known before loading."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return sock


def _serve(service: Service, sock: socket.socket) -> int:
    server = _Server(service)
    for signum in (signal.SIGINT, signal.SIGTERM):
        # uvicorn handles signals while it runs and raises them again for these when it ends.
        signal.signal(signum, server.handle_exit)
    host, port = sock.getsockname()[:2]
    logger.info("model %s: %s", service.names[0], service.description)
    server.run(sockets=[sock])
    if not server.started:
        raise ConfigError(f"cannot listen on {host} port {port}")
    logger.info("the server has ended")
    return 0


class _Server(uvicorn.Server):
    """uvicorn that says where it listens and lets the running request end before it stops."""

    def __init__(self, service: Service):
        self._service = service
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(GRACE_S) + 5,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        worker = self._service.worker
        worker.drain()
        loop = asyncio.get_running_loop()
        end = loop.call_later(GRACE_S, lambda: loop.run_in_executor(None, worker.close))
        await super().shutdown(sockets)
        end.cancel()
        await loop.run_in_executor(None, worker.close)
