"""Command-line flags from a dataclass: the comment after a field is its help."""

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from k3jax.errors import K3Error

T = TypeVar("T")


def parse_flags(
    flags: type[T],
    argv: Sequence[str] | None = None,
    *,
    positional: str | None = None,
    refused: Mapping[str, str] | None = None,
) -> T:
    """An instance of the dataclass `flags` from the command line.

    A field `max_model_len` is the flag `--max-model-len`. `bool` fields also get `--no-...`, fields
    of type `tuple[X, ...]` take several values, `X | None` is an X that may be left out. The
    metadata "short" of a field is another name, such as `-tp`.
    positional: the field that may also be given without its flag.
    refused: flags that people know from elsewhere, and why there are none.
    """
    parser = _Parser(description=inspect.getdoc(flags), allow_abbrev=False)
    parser.refused = refused or {}
    comments = _field_comments(flags)
    hints = typing.get_type_hints(flags)
    groups: dict[type, Any] = {flags: parser}  # its own flags first, then those of its bases
    for owner, field in _fields_by_class(flags):
        if owner not in groups:
            title = (inspect.getdoc(owner) or owner.__name__).partition("\n")[0]
            groups[owner] = parser.add_argument_group(title.rstrip("."))
        text = comments.get(field.name, "").replace("%", "%%")
        if field.default not in (None, (), dataclasses.MISSING):
            text += f" (default: {field.default})"
        groups[owner].add_argument(
            *filter(None, [field.metadata.get("short")]),
            flag(field.name),
            dest=field.name,
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
            help=f"the same as {flag(positional)}",
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


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return f"--{name.replace('_', '-')}"


class _Parser(argparse.ArgumentParser):
    refused: Mapping[str, str]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            spelled = name.replace("_", "-")
            for known_elsewhere in (spelled, spelled.replace("--no-", "--", 1)):
                if reason := self.refused.get(known_elsewhere):
                    self.error(f"{name}: {reason}")
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(spelled, flags, n=1)
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


def _fields_by_class(flags: type) -> list[tuple[type, dataclasses.Field]]:
    """Fields and the classes that define them, a class before its bases."""
    fields = {field.name: field for field in dataclasses.fields(flags)}
    return [
        (owner, fields.pop(name))
        for owner in flags.__mro__
        for name in inspect.get_annotations(owner)
        if name in fields
    ]


def _field_comments(flags: type) -> dict[str, str]:
    """The comments in and behind each field, and the comment lines that continue them."""
    comments: dict[str, str] = {}
    for owner in reversed(flags.__mro__):
        if dataclasses.is_dataclass(owner):
            comments |= _own_comments(textwrap.dedent(inspect.getsource(owner)))
    return comments


def _own_comments(source: str) -> dict[str, str]:
    found = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    texts = {token.start[0]: token.string.lstrip("# ") for token in found}
    alone = {token.start[0] for token in found if token.line.lstrip().startswith("#")}
    comments = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            end = node.end_lineno or node.lineno
            while end + 1 in alone:
                end += 1
            own = (texts.get(number) for number in range(node.lineno, end + 1))
            comments[node.target.id] = " ".join(filter(None, own))
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
