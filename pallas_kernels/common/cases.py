"""One named size of an operator: arguments to run it with, and their shapes to lower it for."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Case:
    """`make(key, **sizes)` gives the arrays of one call: (positional, by keyword)."""

    make: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    sizes: Mapping[str, Any]
    static: Mapping[str, Any] = field(default_factory=dict)  # the other keywords of the call

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random arrays with plausible values: (positional, by keyword)."""
        return jax.jit(functools.partial(self.make, **self.sizes))(_key(seed))

    def avals(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same as shapes and dtypes, without memory."""
        return jax.eval_shape(functools.partial(self.make, **self.sizes), jax.eval_shape(_key))


def _key(seed: int = 0):
    return jax.random.key(seed, impl="rbg")  # compiles in a third of the default's time
