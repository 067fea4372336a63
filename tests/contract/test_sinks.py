"""The contract of sinks (`headwater.testing.check_sink`) held against every sink and its real target.

An append-only target shows each change that arrives twice, an upsert target each wrong merge: every check runs in the
way that can fail for it, and in the other way in `make test-long`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from headwater.connectors.kafka.sink import send_task
from headwater.errors import DefiniteError
from headwater.sink.delivery import DeliveryLoop
from headwater.sink.registry import open_sink
from headwater.spark.sink import run_tasks
from headwater.testing import check_sink as c
from headwater.testing.check_sink import CHECKS, COLUMNS, KEY, Crash, SinkUnderTest, applies, changes_of
from sink_world import KINDS, SinkWorld

pytestmark = pytest.mark.spark
# Upsert by default, because this is where the merge is; the others append-only, where a repetition shows.
IN_MEMORY = {"postgres", "mariadb", "kafka", "files", "python"}
BY_SPARK_TOO = {("postgres", c.check_batches_arrive_in_order)}
UPSERT = {
    *(c.check_batches_arrive_in_order, c.check_reset_allows_delivery_again, c.check_zombie_cannot_commit),
    *(c.check_columns_of_any_name, c.check_keys_that_look_alike_and_texts_of_any_content),
}


def cases() -> list[Any]:
    found = []
    for kind in KINDS:
        for check in CHECKS:
            for append_only, in_memory in itertools.product((False, True), (False, True)):
                if in_memory and kind not in IN_MEMORY:
                    continue
                usual = (check in UPSERT) != append_only
                slow = not usual or kind == "kafka-parallel"
                # The same tasks get rows from memory or from Spark: one target shows both.
                slow = slow or (kind in IN_MEMORY and not in_memory and (kind, check) not in BY_SPARK_TOO)
                marks = [pytest.mark.slow] if slow else []
                marks += [pytest.mark.kafka] if kind.startswith("kafka") else []
                name = f"{kind}-{check.__name__}-{'append-only' if append_only else 'upsert'}"
                name += "-in-memory" if in_memory else ""
                found.append(pytest.param(kind, check, append_only, in_memory, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("kind", "check", "append_only", "in_memory"), cases())
def test_sink_keeps_the_contract(
    kind: str, check: Any, append_only: bool, in_memory: bool, spark: Any, sink_world: SinkWorld
) -> None:
    under = sink_world.target(kind).under_test(spark, append_only=append_only)
    under.in_memory = in_memory
    assert not in_memory or under.open(1).takes_rows
    if not applies(check, under):
        pytest.skip("does not apply to such a sink")
    check(under)


@pytest.mark.parametrize(
    "in_memory", [pytest.param(False, marks=pytest.mark.slow, id="by-spark"), pytest.param(True, id="in-memory")]
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_print_keeps_what_a_terminal_can_keep(
    check: Any, in_memory: bool, spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any]] = []

    def rows() -> list[Any]:
        lines.extend(json.loads(line) for line in capsys.readouterr().out.splitlines())
        kept: dict[int, Any] = {}
        for line in lines:
            row = line["row"]
            kept.pop(row["id"], None)
            if line["op"] == "upsert":
                kept[row["id"]] = (row["id"], row["name"], row["amount"] and c.Decimal(row["amount"]))
        return list(kept.values())

    def reopen(generation: int) -> Any:
        return open_sink("shown", {"connector": "print"}, COLUMNS, KEY, generation, str)

    under = SinkUnderTest(spark=spark, open=reopen, rows=rows, durable=False, in_memory=in_memory)
    if not applies(check, under):
        pytest.skip("does not apply to such a sink")
    check(under)


def test_blackhole_reads_every_row_and_keeps_its_place(spark: Any) -> None:
    sink = open_sink("hole", {"connector": "blackhole"}, COLUMNS, KEY, 1, str)
    under = SinkUnderTest(spark=spark, open=lambda _: sink, rows=list, durable=False)
    loop = DeliveryLoop(sink)
    loop.start(None)
    changes = changes_of(1, append_only=False)
    assert loop.deliver(0, 10, lambda: under.batch(changes)).rows == len(changes)
    assert sink.last_committed() == 10


@pytest.mark.kafka
@pytest.mark.parametrize("crash", ["after the intent", "after one of two producers", "before the epoch is noted"])
def test_a_batch_of_several_producers_is_finished_by_the_successor_exactly_once(
    crash: str, spark: Any, sink_world: SinkWorld
) -> None:
    """The parts of a batch that landed before a crash are left out when it is delivered again."""
    target = sink_world.target("kafka-parallel")
    under = target.under_test(spark, append_only=True)
    first = target.open(1, append_only=True)
    first.validate(COLUMNS, ())
    sent = {"after the intent": 0, "after one of two producers": 1, "before the epoch is noted": 2}[crash]

    def partly(token: Any, producers: int) -> None:
        assert producers == 2
        if sent:
            run_tasks(spark.range(0, sent, 1, sent), send_task(first.place, token, alone=False), commits=True)
        raise Crash

    first._send = partly
    loop = DeliveryLoop(first)
    assert loop.start(None) is None
    changes = changes_of(1, append_only=True)
    with pytest.raises(Crash):
        loop.deliver(1_000, 1_010, lambda: under.batch(changes))
    second = target.open(2, append_only=True)
    loop = DeliveryLoop(second)
    found = loop.start(None)
    if sent == 2:
        assert (found, loop.unfinished()) == (1_010, None)
    else:
        assert (found, loop.unfinished()) == (None, (1_000, 1_010))
        with pytest.raises(Exception, match="SINK_OVERLAP"):
            loop.deliver(1_000, 1_020, lambda: under.batch(changes))
        loop = DeliveryLoop(second)
        loop.deliver(1_000, 1_010, lambda: under.batch(changes))
    assert second.last_committed() == 1_010
    under.expect(changes)
    under.compare(f"a crash {crash}")
    with pytest.raises(Exception, match="SINK_FENCED"):
        first.prepare(1_010, 1_020)
    loop.deliver(1_010, 1_020, lambda: under.batch(changes_of(2, append_only=True)))
    under.expect(changes_of(2, append_only=True))
    under.compare("the batch after it")


TARGETS = ("postgres", "mariadb", "delta", "iceberg", "files")
ODD = {"ascii-1": c.NAMES[0], "ascii-2": c.NAMES[1], "placeholders": "100% %s %(x)s {0} ${x} $1", "other": "ünï ☃"}


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_of_any_name_is_found_again_or_refused(
    kind: str, name: str, spark: Any, sink_world: SinkWorld
) -> None:
    """In schema or database, table and path; across a restart."""
    if kind == "delta" and "\\" in name:
        with pytest.raises(DefiniteError, match="SINK_NAME_REFUSED"):
            sink_world.target(kind, name).open(1).validate(COLUMNS, KEY)
        name = name.replace("\\", "")
    under = sink_world.target(kind, name).under_test(spark)
    under.in_memory = kind in IN_MEMORY
    columns = (c.Column("id", "BIGINT", nullable=False), c.Column("v", "STRING"))
    c.check_two_engines(under, columns, ("id",), [(1, "a"), (2, "b")], [(1, "c")], [(2, None)])
