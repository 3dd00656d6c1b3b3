"""All operators at their named sizes: real ones without memory, small ones on a GPU."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.testing import tolerance
from tests.kernels.jaxprs import avals_made

IMPLEMENTATIONS = {  # of each operator; names of pallas_kernels.<operator>
    "short_conv": ("xla",),
    "kda_prefill": ("xla", "reference"),
    "kda_decode": ("xla",),
    "mla_prefill": ("xla", "reference"),
    "mla_decode": ("xla", "reference"),
    "attn_res": ("xla",),
    "router": ("xla",),
    "moe_experts": ("gathered", "sorted_loop", "ragged", "reference"),
}


def load(name):
    """The operator and its named cases."""
    cases = importlib.import_module(f"pallas_kernels.{name}.cases").CASES
    return getattr(importlib.import_module(f"pallas_kernels.{name}"), name), cases


CASES = [(name, case) for name in IMPLEMENTATIONS for case in load(name)[1]]
SMALL = [(name, case) for name, case in CASES if case.startswith("tiny")]


def bound(name, case, implementation):
    """The operator with everything given but its arrays."""
    operator, cases = load(name)
    return functools.partial(operator, **cases[case].static, implementation=implementation)


@pytest.mark.parametrize("name, case", CASES)
def test_shapes_at_every_named_size(name, case):
    """Outputs follow the arguments' dtypes; what is float32 by contract is float32."""
    args, kwargs = load(name)[1][case].avals()
    out = jax.eval_shape(bound(name, case, None), *args, **kwargs)
    first = args[0]
    if name == "kda_prefill":
        assert (out[0].shape, out[0].dtype) == (args[2].shape, args[2].dtype)
        assert (out[1].shape, out[1].dtype) == (args[5].shape, jnp.float32)
    elif name == "kda_decode":
        assert (out[0].shape, out[0].dtype) == (args[5].shape, args[5].dtype)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), out[1]) == jax.tree.map(
            lambda x: (x.shape, x.dtype), args[7]
        )
    elif name == "attn_res":
        assert (out[0].shape, out[0].dtype) == (args[1].shape, args[1].dtype)
        assert (out[1].shape, out[1].dtype) == ((first.shape[1], first.shape[0] + 1), jnp.float32)
    elif name == "router":
        assert out[0].shape == out[1].shape and out[0].shape[0] == first.shape[0]
        assert (out[0].dtype, out[1].dtype) == (jnp.int32, jnp.float32)
    elif name == "moe_experts":
        assert (out.shape, out.dtype) == (first.shape, jnp.float32)
    else:
        assert out.shape[:2] == first.shape[:2] and out.dtype == first.dtype


@pytest.mark.parametrize("name, case", SMALL)
def test_nothing_is_float64_under_x64(name, case):
    """A strongly typed constant or a default dtype would widen the whole path after it."""
    with jax.enable_x64(True):
        args, kwargs = load(name)[1][case].avals()
        for implementation in IMPLEMENTATIONS[name]:
            try:
                traced = jax.jit(bound(name, case, implementation)).trace(*args, **kwargs)
            except NotImplementedError:
                continue
            wide = {str(a) for a in avals_made(traced.jaxpr) if a.dtype == jnp.float64}
            assert not wide, f"{implementation}: {wide}"


@pytest.mark.gpu
@pytest.mark.parametrize("name, case", SMALL)
def test_implementations_agree_on_this_device(name, case):
    """Each is compared with the last one listed, which is the most literal."""
    args, kwargs = load(name)[1][case].arguments()
    outs = {}
    for implementation in IMPLEMENTATIONS[name]:
        with contextlib.suppress(NotImplementedError):
            run = jax.jit(bound(name, case, implementation))
            outs[implementation] = jax.tree.leaves(run(*args, **kwargs))
    *others, expected = outs.values()
    assert all(np.all(np.isfinite(x)) for x in expected)
    for out in others:
        for a, b in zip(out, expected, strict=True):
            scale = float(np.abs(b).max())
            np.testing.assert_allclose(a, b, **tolerance(b.dtype, scale=scale))


def test_the_names_are_those_of_the_dispatch():
    for name, known in IMPLEMENTATIONS.items():
        operator, cases = load(name)
        args, kwargs = cases["tiny"].avals()
        listed = "'" + "', '".join(known) + "'"
        with pytest.raises(ValueError, match=rf"is none of \[{listed}\]"):
            jax.eval_shape(bound(name, "tiny", "no_such_name"), *args, **kwargs)
