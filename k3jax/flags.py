"""Command-line flags from a dataclass: the comment after a field is its help."""

import argparse
import dataclasses
import difflib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from k3jax.errors import K3Error

T = TypeVar("T")


def parse_flags(
    flags: type[T], argv: Sequence[str] | None = None, *, positional: str | None = None
) -> T:
    """An instance of the dataclass `flags` from the command line.

    A field `max_model_len` is the flag `--max-model-len`. `bool` fields also get `--no-...`, fields
    of type `tuple[X, ...]` take several values, `X | None` is an X that may be left out.
    positional: the field that may also be given without its flag.
    """
    parser = _Parser(description=inspect.getdoc(flags), allow_abbrev=False)
    comments = _field_comments(flags)
    hints = typing.get_type_hints(flags)
    for field in dataclasses.fields(flags):  # type: ignore[arg-type]
        text = comments.get(field.name, "").replace("%", "%%")
        if field.default not in (None, (), dataclasses.MISSING):
            text += f" (default: {field.default})"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            required=field.default is dataclasses.MISSING and field.name != positional,
            help=text,
            **_argument(hints[field.name]),
        )
    if positional is not None:
        parser.add_argument(
            "_positional",
            metavar=positional,
            nargs="?",
            type=_argument(hints[positional])["type"],
            help=f"the same as --{positional.replace('_', '-')}",
        )
    values = vars(parser.parse_args(argv))
    given = values.pop("_positional", None)
    if positional is not None and given is not None:
        values.setdefault(positional, given)
        if values[positional] != given:
            parser.error(f"{positional} is given twice: {given} and {values[positional]}")
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}  # type: ignore[arg-type]
    for name, default in defaults.items():
        if default is dataclasses.MISSING and name not in values:  # the positional one
            parser.error(f"{name} is required")
    return flags(**values)


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(name.replace("_", "-"), flags, n=1)
            meant = f", did you mean {near[0]}?" if near else ""
            kind = "unknown flag" if name.startswith("-") else "unexpected argument"
            self.error(f"{kind} {name}{meant or ' (see --help)'}")
        return known

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _argument(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (hint,) = (arg for arg in args if arg is not type(None))
        return _argument(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is tuple:
        return {"type": args[0], "nargs": "+", "action": _Tuple}
    if origin is typing.Literal:
        return {"type": type(args[0]), "choices": args}
    return {"type": hint, "metavar": hint.__name__.upper()}


class _Tuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _field_comments(flags: type) -> dict[str, str]:
    """The comment behind each field, and the comment lines that continue it."""
    comments: dict[str, str] = {}
    name = None
    for line in inspect.getsource(flags).splitlines():
        if match := re.match(r"    (\w+)\s*:[^#]*(?:#\s*(.*))?$", line):
            name = match[1]
            comments[name] = match[2] or ""
        elif name and (match := re.match(r"    \s*#\s*(.*)$", line)):
            comments[name] += f" {match[1]}"
        else:
            name = None
    return comments


def run_script(main: Callable[[], None]) -> NoReturn:
    """Runs a script: what a user can put right becomes one line on stderr and exit code 1."""
    try:
        main()
    except K3Error as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
