"""Choice between the implementations of one operation."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

Implementation = str | None
"""The name of an implementation, or None for the first that accepts the arguments."""

logger = logging.getLogger(__name__)


def first_supported(
    wanted: Implementation,
    implementations: Mapping[str, Callable[..., Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs `wanted`, or else the first implementation that accepts the arguments.

    An implementation refuses by NotImplementedError, and only that lets the next one try: any
    other error passes through, and one asked for by name never falls back.
    """
    if wanted is not None:
        if wanted not in implementations:
            raise ValueError(f"implementation={wanted!r} is none of {list(implementations)}")
        return implementations[wanted](*args, **kwargs)
    for run in implementations.values():
        try:
            result = run(*args, **kwargs)
        except NotImplementedError:
            continue
        _log_once(f"{run.__module__}.{run.__qualname__}")
        return result
    raise NotImplementedError(f"none of {list(implementations)} accepts these arguments")


@functools.cache
def _log_once(name: str) -> None:
    logger.info("using %s", name)
