"""Flags from a dataclass."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from k3jax.flags import parse_flags


@dataclass(frozen=True)
class Flags:
    """A program for the test."""

    model: str | None = None  # the folder, which
    # takes two lines to tell
    max_len: int | None = None  # 100% of the length
    rate: float = 1.5  # of things
    names: tuple[str, ...] = ()  # several
    fast: bool = False  # quickly
    kind: Literal["a", "b"] = "a"  # one of two


def parse(*argv: str) -> Flags:
    return parse_flags(Flags, argv, positional="model")


def test_values():
    assert parse() == Flags()
    assert parse("x", "--max-len", "3", "--rate=2", "--fast") == Flags("x", 3, 2.0, (), True)
    assert parse("--names", "a", "b", "--kind", "b") == Flags(names=("a", "b"), kind="b")
    assert parse("--model", "x", "--no-fast") == Flags("x")
    assert parse("x", "--model", "x") == Flags("x")


def test_help_is_the_comments(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "A program for the test." in text
    assert "the folder, which takes two lines to tell" in text
    assert "100% of the length" in text
    assert "of things (default: 1.5)" in text


REFUSED = {
    "unknown_flag": (["--max-lem", "3"], "unknown flag --max-lem, did you mean --max-len?"),
    "underscores": (["--max_len=3"], "unknown flag --max_len, did you mean --max-len?"),
    "far_flag": (["--zzz"], "unknown flag --zzz (see --help)"),
    "abbreviation": (["--max", "3"], "unknown flag --max"),
    "two_models": (["x", "y"], "unexpected argument y"),
    "contradiction": (["x", "--model", "y"], "model is given twice: x and y"),
    "no_number": (["--max-len", "many"], "--max-len"),
    "no_choice": (["--kind", "c"], "--kind"),
}


@pytest.mark.parametrize("argv, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_one_line(capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_a_required_field_may_be_positional(capsys):
    @dataclass
    class Needs:
        """Needs a folder."""

        folder: str  # to read

    assert parse_flags(Needs, ["here"], positional="folder") == Needs("here")
    assert parse_flags(Needs, ["--folder", "here"], positional="folder") == Needs("here")
    with pytest.raises(SystemExit):
        parse_flags(Needs, [], positional="folder")
    assert "folder is required" in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class Base:
    """What every program has."""

    wrapped: Literal[
        "one",
        "two",
    ] = "one"  # a value on several lines
    plain: int | None = None  # inside of parentheses
    # and behind them
    bare: int = 3


@dataclass(frozen=True)
class Derived(Base):
    """A program with more."""

    size: int = field(default=1, metadata={"short": "-sz"})  # has a short name


def test_flags_of_a_base(capsys):
    assert parse_flags(Derived, ["-sz", "2", "--wrapped", "two", "--bare", "4"]) == Derived(
        2, wrapped="two", bare=4
    )
    assert parse_flags(Derived, ["--size=2"]) == Derived(2)
    with pytest.raises(SystemExit):
        parse_flags(Derived, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "-sz INT, --size INT has a short name (default: 1)" in text
    assert text.index("--size INT") < text.index("What every program has:")
    assert "a value on several lines (default: one)" in text
    assert "inside of parentheses and behind them" in text


def test_refused_flags_tell_why(capsys):
    refused = {"--slow": "it is always fast"}
    for name in ("--slow", "--no-slow", "--slow=3"):
        with pytest.raises(SystemExit):
            parse_flags(Flags, [name], refused=refused)
        error = capsys.readouterr().err
        assert error == f"error: {name.partition('=')[0]}: it is always fast\n"
