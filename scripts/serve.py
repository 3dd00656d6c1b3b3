"""Serves a model over HTTP: `python scripts/serve.py [MODEL] [flags]`, see --help."""

import sys
from pathlib import Path

from k3jax.errors import ConfigError, K3Error
from k3jax.flags import parse_flags
from k3jax.serve.config import REFUSED_FLAGS, ServerConfig
from k3jax.serve.server import ModelSource, run


def default_model() -> Path:
    from k3jax.checkpoint.tiny import ensure_tiny  # imports jax, so not for --help

    return ensure_tiny()


def is_untrained(path: str | Path) -> bool:
    from k3jax.checkpoint import tiny

    return tiny.is_untrained(path)


def load_engine(config: ServerConfig, path: str):
    import jax

    from k3jax.distributed.mesh import make_mesh
    from k3jax.engine.compile_cache import enable_compile_cache
    from k3jax.engine.engine import Engine

    enable_compile_cache()
    size, count = config.tensor_parallel_size, len(jax.devices())
    if size > count:
        raise ConfigError(f"--tensor-parallel-size {size} needs {size} devices; there are {count}")
    return Engine.from_pretrained(path, config, mesh=make_mesh(tp=size) if size > 1 else None)


def main() -> int:
    try:
        config = parse_flags(ServerConfig, positional="model", refused=REFUSED_FLAGS)
    except K3Error as error:
        print("error:", error, file=sys.stderr)
        return 2
    return run(config, ModelSource(default_model, is_untrained, load_engine))


if __name__ == "__main__":
    sys.exit(main())
