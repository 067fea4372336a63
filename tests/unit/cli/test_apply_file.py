"""`run FILE`: what is run again and what is not, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headwater.cli.statements import apply_file
from headwater.errors import TransientError
from headwater.runtime.result import Result


class ScriptedEngine:
    """Notes what it is told; a data directory without any job, whose `applied` marks outlive a run."""

    def __init__(self) -> None:
        self.core = self.registry = self.applied = self
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

    def has_run(self, text: str, times: int) -> bool:
        return self.marks.get(text, 0) >= times

    async def run(self, text: str, times: int, *, preamble: str) -> None:
        self.execute(preamble + text)
        self.marks[text] = times

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def apply(self, text: str) -> list[str]:
        self.said = []
        apply_file(self, text)
        return self.said


def test_a_statement_that_stands_twice_in_a_file_runs_twice_and_never_again() -> None:
    engine = ScriptedEngine()
    text = "INSERT INTO t VALUES (1); INSERT INTO t VALUES (1);"
    assert engine.apply(text) == ["INSERT INTO t VALUES (1)"] * 2
    assert engine.apply(text) == []
    assert engine.apply(text * 2) == ["INSERT INTO t VALUES (1)"] * 2


def test_waiting_and_looking_are_for_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine()
    text = "WAIT; SELECT 1 AS n; SHOW JOBS; FLUSH"
    assert engine.apply(text) == engine.apply(text) == ["WAIT", "SELECT 1 AS n", "SHOW JOBS", "FLUSH"]
    assert capsys.readouterr().out.count("(1 row)") == 4


def test_a_write_that_failed_runs_again() -> None:
    engine = ScriptedEngine()
    engine.failing = "INSERT INTO t VALUES (1)"
    with pytest.raises(TransientError):
        engine.apply("INSERT INTO t VALUES (1)")
    engine.failing = ""
    assert engine.apply("INSERT INTO t VALUES (1)") == ["INSERT INTO t VALUES (1)"]


def test_the_dialect_of_a_file_is_said_before_each_statement_and_is_no_part_of_its_mark() -> None:
    engine = ScriptedEngine()
    engine.apply("INSERT INTO t VALUES (1)")
    assert engine.apply("SET dialect = 'postgres'; INSERT INTO t VALUES (1); INSERT INTO t VALUES (2)") == [
        "SET dialect = 'postgres';INSERT INTO t VALUES (2)"
    ]
