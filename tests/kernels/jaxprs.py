"""What a traced program makes on its way."""

from jax.extend.core import ClosedJaxpr, jaxprs_in_params


def avals_made(closed: ClosedJaxpr):
    """Abstract values of everything computed, loops and calls included."""
    yield from (constant.aval for constant in closed.jaxpr.constvars)
    yield from _avals(closed.jaxpr)


def _avals(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _avals(inner)
