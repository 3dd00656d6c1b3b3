"""Serves a model over HTTP: `python scripts/serve.py [MODEL] [flags]`, see --help."""

import sys
from pathlib import Path

from k3jax.errors import K3Error
from k3jax.flags import parse_flags
from k3jax.serve.server import ModelSource, ServerConfig, load_generator, run


def default_model() -> Path:
    from k3jax.checkpoint.tiny import ensure_tiny  # imports jax, so not for --help

    return ensure_tiny()


def is_untrained(path: str | Path) -> bool:
    from k3jax.checkpoint import tiny

    return tiny.is_untrained(path)


def main() -> int:
    try:
        config = parse_flags(ServerConfig, positional="model")
    except K3Error as error:
        print("error:", error, file=sys.stderr)
        return 2
    return run(config, ModelSource(default_model, is_untrained, load_generator))


if __name__ == "__main__":
    sys.exit(main())
