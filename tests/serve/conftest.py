"""Servers that many tests share."""

from collections.abc import Iterator

import pytest

from tests.serve.scripted import Running, ScriptedEngine, ids_of, serving


@pytest.fixture(scope="module")
def _scripted() -> Iterator[Running]:
    with serving(ScriptedEngine()) as running:
        yield running


@pytest.fixture
def scripted(_scripted) -> Running:
    """A server whose engine each test sets up as it likes; starting one takes 0.2 s."""
    vars(_scripted.engine).update(vars(ScriptedEngine()))
    return _scripted


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """A server for requests that need nothing special of the engine."""
    answer = "Two and two.⟦close⟧think⟦sep⟧⟦open⟧response⟦sep⟧It is 4, 漢字 👍."
    answer += "⟦close⟧response⟦sep⟧⟦close⟧message⟦sep⟧⟦end_of_msg⟧"
    with serving(ScriptedEngine(answer=ids_of(answer), step_tokens=3)) as running:
        yield running
