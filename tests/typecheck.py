"""The checker of annotated calls that conftest.py installs."""

from beartype import beartype


def checked(function):
    """beartype, except for constructors: JAX rebuilds pytrees from whatever stands in their leaves
    (partition specs, abstract values, sentinels), and a part of a pool has other leading axes."""
    return function if function.__name__ == "__init__" else beartype(function)
