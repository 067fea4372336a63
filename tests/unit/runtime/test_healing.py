"""What hw_errors says of a captured table that failed: whether it is mended here, also after a restart."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.errors import HeadwaterError, SourceError
from headwater.runtime.healing import Healing


class FakeTable:
    """A captured table that failed; `reshaped`: the source's columns are others now, and may be taken."""

    def __init__(self, *, policy: str = "lenient", reshaped: bool = False) -> None:
        self.table_id, self.name, self.policy = 7, "t", policy
        self.failed = self.stopped = True
        self.dropped = False
        self.replacing = False
        self.reshaped = reshaped
        self.copies = 0
        self.deciding = asyncio.Lock()

    async def copy_again(self, *, follow: bool, only_if_reshaped: bool = False, notice: object = None) -> bool:
        self.copies += self.reshaped or not only_if_reshaped
        return self.reshaped or not only_if_reshaped

    async def stop(self) -> None:
        pass

    def report(self, **_: Any) -> None:
        pass


def healing_of(errors: list[dict[str, Any]]) -> Healing:
    """`errors` is `hw_errors`, and gets what is recorded."""

    def job_failed(job_id: int, error: HeadwaterError, contribution: object, *, retrying: bool = False) -> None:
        errors.append(row(error.code, retrying=retrying))

    async def request(**_: Any) -> int:
        return 1

    meta = SimpleNamespace(error_rows=lambda: errors)
    core: Any = SimpleNamespace(meta=meta, job_failed=job_failed, main=SimpleNamespace(request=request))
    return Healing(core)


def row(code: str, *, retrying: bool) -> dict[str, Any]:
    return {"job_id": 7, "code": code, "message": "what", "hint": "", "retrying": retrying}


def recalled(errors: list[dict[str, Any]]) -> bool:
    healing, table = healing_of(errors), FakeTable()
    source: Any = SimpleNamespace(tables={table.table_id: table})
    healing.recall([source])
    return healing.heals(table.table_id)


@pytest.mark.parametrize(
    ("code", "policy", "heals"),
    [
        ("ROW_UNKNOWN", "exception", True),
        ("SOURCE_SCHEMA_CHANGED", "lenient", True),
        ("SOURCE_SCHEMA_CHANGED", "exception", False),
        ("SOURCE_PERMISSION", "lenient", False),
    ],
)
def test_failure_that_a_new_copy_may_heal_is_told_as_one_that_is_retried(code: str, policy: str, heals: bool) -> None:
    table: Any = FakeTable(policy=policy)
    healing = healing_of([])
    assert healing.table_failed(table, SourceError(code, "what")) is heals
    assert healing.heals(table.table_id) is heals


@pytest.mark.parametrize("reshaped", [True, False])
def test_failure_that_no_new_copy_heals_is_told_once_more_as_one_that_stays(reshaped: bool) -> None:
    errors: list[dict[str, Any]] = []
    table: Any = FakeTable(reshaped=reshaped)
    healing = healing_of(errors)
    healing.table_failed(table, SourceError("VALUE_MALFORMED", "what"))
    asyncio.run(healing._heal(table))
    assert table.copies == reshaped
    assert [e["retrying"] for e in errors] == ([] if reshaped else [False])
    assert not healing.heals(table.table_id)


def test_new_copy_that_could_not_begin_before_a_restart_begins_after_it() -> None:
    assert recalled([row("ROW_UNKNOWN", retrying=True)])
    assert recalled([row("ROW_UNKNOWN", retrying=True), row("SOURCE_UNREACHABLE", retrying=True)])


def test_failure_that_was_found_to_stay_is_not_tried_again_at_every_start() -> None:
    assert not recalled([row("VALUE_MALFORMED", retrying=True), row("VALUE_MALFORMED", retrying=False)])
    assert not recalled([row("ROW_UNKNOWN", retrying=True), row("SOURCE_TABLE_REPLACED", retrying=False)])


def test_resync_that_the_user_asked_for_is_not_ended_by_what_was_found_before_it() -> None:
    """The failure is known, and looked into, just when RESYNC begins: the table is copied, and not stopped."""
    errors: list[dict[str, Any]] = []
    table: Any = FakeTable()
    healing = healing_of(errors)
    healing.table_failed(table, SourceError("VALUE_NOT_REPRESENTABLE", "what"))

    async def resync_while_healing_looks() -> None:
        async with table.deciding:
            looking = asyncio.create_task(healing._guarded(table, lambda: healing._heal(table)))
            await asyncio.sleep(0.01)
            table.failed, table.replacing = False, True
            healing.forget(table)
        await looking

    asyncio.run(resync_while_healing_looks())
    assert not errors and not table.copies


class DroppedTable(FakeTable):
    """One whose DROP is committed while it is looked into: nothing is known of it any more."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.dropped = before

    @property
    def failed(self) -> bool:
        self.dropped = True
        raise KeyError(self.table_id)

    @failed.setter
    def failed(self, _: bool) -> None: ...


@pytest.mark.parametrize("before", [True, False])
def test_table_that_is_dropped_while_it_is_looked_into_is_left_alone(before: bool) -> None:
    async def look() -> int:
        healing, table = healing_of([]), DroppedTable(before=before)
        await healing._guarded(table, lambda: healing._heal(table))  # type: ignore[arg-type]
        return table.copies

    assert asyncio.run(look()) == 0
