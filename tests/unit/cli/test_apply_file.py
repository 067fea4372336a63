"""`run FILE`: what is run again and what is not, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headwater.cli.statements import CREATES, apply_file
from headwater.errors import TransientError, UsageError
from headwater.runtime.result import Result
from headwater.sql import statements as s
from headwater.sql.parser import parse
from headwater.storage.checkpoint import JobRow


class ScriptedEngine:
    """Notes what it is told; a data directory with a few jobs, whose `applied` marks outlive a run."""

    def __init__(self) -> None:
        self.core = self.registry = self.applied = self.functions = self
        self.jobs: dict[str, JobRow] = {}
        self.notes: list[str] = []
        self.marks: dict[str, int] = {}
        self.said: list[str] = []
        self.failing = ""

    def get(self, name: str) -> JobRow | None:
        return self.jobs.get(name)

    def has(self, statement: s.CreateFunction) -> bool:
        return statement.name in self.jobs

    def execute(self, text: str) -> list[Any]:
        if text == self.failing:
            raise TransientError("TEST_LOST", "the engine went away")
        self.said.append(text)
        for one in parse(text):
            if isinstance(one, CREATES):
                self.jobs[one.name] = JobRow(1, one.name, "table", "live", "main", one.text, {})
            elif isinstance(one, s.Drop):
                self.jobs.pop(one.name, None)
        return [Result(["n"], [{"n": 1}], 7)]

    def has_run(self, text: str, times: int) -> bool:
        return self.marks.get(text, 0) >= times

    async def run(self, text: str, times: int, *, preamble: str) -> None:
        self.execute(preamble + text)
        self.marks[text] = times

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def apply(self, text: str) -> list[str]:
        self.said, self.notes = [], []
        apply_file(self, text, self.notes.append)
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


FILE = """CREATE TABLE t (id INT PRIMARY KEY); CREATE FUNCTION f RETURNS INT LANGUAGE PYTHON AS 'm:f';
CREATE MATERIALIZED VIEW v AS SELECT f(id) AS n FROM t; INSERT INTO t VALUES (1)"""


def test_what_was_dropped_since_is_created_again_and_what_is_skipped_is_said() -> None:
    engine = ScriptedEngine()
    assert len(engine.apply(FILE)) == 4
    assert engine.notes == []
    assert engine.apply(FILE) == []
    assert engine.notes == [
        "skipped, it has run on this data directory before: INSERT INTO t VALUES (1)",
        "there already: t, f, v",
    ]
    engine.jobs.clear()
    assert [text.split()[1] for text in engine.apply(FILE)] == ["TABLE", "FUNCTION", "MATERIALIZED"]
    assert engine.notes == ["skipped, it has run on this data directory before: INSERT INTO t VALUES (1)"]


def test_a_definition_that_differs_is_an_error_that_says_which() -> None:
    engine = ScriptedEngine()
    engine.apply(FILE)
    with pytest.raises(UsageError, match=r"DEFINITION_DIFFERS.*table t exists"):
        engine.apply("CREATE TABLE t (id BIGINT PRIMARY KEY)")


@pytest.mark.parametrize("end", ["DROP MATERIALIZED VIEW v; DROP TABLE t", "DROP TABLE t CASCADE"])
def test_what_the_file_itself_drops_stays_dropped(end: str) -> None:
    engine = ScriptedEngine()
    text = f"CREATE TABLE t (id INT); CREATE MATERIALIZED VIEW v AS SELECT id FROM t; {end}"
    engine.apply(text)
    engine.jobs.clear()
    assert engine.apply(text) == []
    assert len(engine.notes) == 2 + len(end.split(";"))
