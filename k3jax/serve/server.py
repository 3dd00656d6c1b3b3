"""From flags to a running server."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import uvicorn

from k3jax.chat.tokenizer import Tokenizer, load_tokenizer
from k3jax.engine.async_engine import AsyncEngine, EngineLike
from k3jax.engine.inputs import GenerationDefaults, Inputs
from k3jax.errors import ConfigError, K3Error
from k3jax.flags import flag
from k3jax.serve.app import create_app
from k3jax.serve.config import WITHOUT_EFFECT, ServerConfig
from k3jax.serve.service import Service

logger = logging.getLogger(__name__)

UNTRAINED_NAME = "k3jax-tiny"
UNTRAINED = (
    "UNTRAINED: a model of the Kimi K3 architecture with seeded random weights. Its answers are "
    "noise; it shows that the server works."
)
GRACE_S = 5.0  # what running requests get when the server is asked to end


@dataclass(frozen=True)
class ModelSource:
    """Where models come from, so that the server itself needs no checkpoint code."""

    default: Callable[[], str | Path]  # folder of the model that is served when none is named
    is_untrained: Callable[[str | Path], bool]  # a folder whose weights are random
    load: Callable[[ServerConfig, str], EngineLike]


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
    for option, reason in WITHOUT_EFFECT.items():
        if getattr(config, option):
            logger.info("%s has no effect: %s", flag(option), reason)
    path = str(source.default()) if config.model is None else config.model
    name = UNTRAINED_NAME if config.model is None else config.model
    tokenizer = _tokenizer(config, Path(path))
    defaults = _generation_defaults(config, Path(path))
    engine = AsyncEngine(lambda: source.load(config, path))
    engine.start()
    inputs = Inputs(tokenizer, defaults, engine.engine.vocab_size, engine.engine.max_model_len)
    inputs.check_vocabulary()
    if tokenizer is None:
        logger.warning("no tokenizer files in %s: only completions of token ids", path)
    elif tokenizer.missing_chat_tokens:
        logger.warning(
            "the tokenizer lacks %s: completions, no chat", " ".join(tokenizer.missing_chat_tokens)
        )
    if defaults.sampling:
        settings = ", ".join(f"{key} {value}" for key, value in defaults.sampling.items())
        logger.info("where requests leave it open: %s (--generation-config)", settings)
    return Service(
        engine,
        inputs,
        names=config.served_model_name or (name,),
        description=UNTRAINED
        if source.is_untrained(path)
        else f"The checkpoint {Path(path).name}.",
        max_waiting=config.max_waiting,
    )


def _tokenizer(config: ServerConfig, folder: Path) -> Tokenizer | None:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    return load_tokenizer(folder) if (folder / "tiktoken.model").exists() else None


def _generation_defaults(config: ServerConfig, folder: Path) -> GenerationDefaults:
    if config.generation_config == "auto":
        return GenerationDefaults.read(folder)
    if config.generation_config == "vllm":
        return GenerationDefaults(eos_ids=GenerationDefaults.read(folder).eos_ids)
    if not (Path(config.generation_config) / "generation_config.json").exists():
        raise ConfigError(
            f"--generation-config {config.generation_config}: neither auto nor vllm, nor a folder "
            "with a generation_config.json"
        )
    return GenerationDefaults.read(config.generation_config)


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
    """uvicorn that says where it listens and lets running requests end before it stops."""

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
        engine = self._service.engine
        engine.drain()
        loop = asyncio.get_running_loop()
        end = loop.call_later(GRACE_S, lambda: loop.run_in_executor(None, engine.close))
        await super().shutdown(sockets)
        end.cancel()
        await loop.run_in_executor(None, engine.close)
