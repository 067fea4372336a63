"""`run FILE`: what is run again and what is not, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.cli.commands import apply_file
from headwater.errors import TransientError
from headwater.runtime.queries import Result


class ScriptedEngine:
    """Notes what it is told; a data directory without any job, whose `applied` marks outlive a run."""

    def __init__(self) -> None:
        self.core = self.registry = self
        self.marks: dict[str, int] = {}
        self.said: list[str] = []
        self.failing = ""

    def get(self, name: str) -> None:
        """No job exists."""

    def execute(self, text: str) -> list[Any]:
        if text == self.failing:
            raise TransientError("TEST_LOST", "the engine went away")
        self.said.append(text)
        return [Result(["n"], [{"n": 1}], 7)]

    def applied(self, text: str, times: int) -> bool:
        return self.marks.get(text, 0) >= times

    def mark_applied(self, text: str, times: int) -> None:
        self.marks[text] = times

    def run(self, text: str) -> list[str]:
        self.said = []
        apply_file(self, text)
        return self.said


def test_a_statement_that_stands_twice_in_a_file_runs_twice_and_never_again() -> None:
    engine = ScriptedEngine()
    text = "INSERT INTO t VALUES (1); INSERT INTO t VALUES (1);"
    assert engine.run(text) == ["INSERT INTO t VALUES (1)", "FLUSH"] * 2
    assert engine.run(text) == []
    assert engine.run(text * 2) == ["INSERT INTO t VALUES (1)", "FLUSH"] * 2


def test_waiting_and_looking_are_for_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine()
    text = "WAIT; SELECT 1 AS n; SHOW JOBS; FLUSH"
    assert engine.run(text) == engine.run(text) == ["WAIT", "SELECT 1 AS n", "SHOW JOBS", "FLUSH"]
    assert capsys.readouterr().out.count("(1 row)") == 4


def test_a_write_that_was_not_durable_yet_runs_again() -> None:
    engine = ScriptedEngine()
    engine.failing = "FLUSH"
    with pytest.raises(TransientError):
        engine.run("INSERT INTO t VALUES (1)")
    engine.failing = ""
    assert engine.run("INSERT INTO t VALUES (1)") == ["INSERT INTO t VALUES (1)", "FLUSH"]
