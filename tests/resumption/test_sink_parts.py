"""A batch that several Kafka producers send, when some of them fail: what is there is not sent again, the rest is (I5).

The sink is append-only: a change that is delivered twice stays visible in the topic for ever.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_process import EngineProcess
from sink_targets import read_topic
from sink_world import SinkWorld

pytestmark = [pytest.mark.spark, pytest.mark.kafka]
PATIENCE_S = 240.0


def eventually(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.3)


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sink is told to do (`killing_sink.PartlySendingSink`)."""
    return tmp_path_factory.mktemp("parts") / "order"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with EngineProcess(tmp_path_factory.mktemp("delivery") / "data", "--allow-python") as running:
        running.sql("CREATE TABLE e (id BIGINT PRIMARY KEY, n INT); INSERT INTO e SELECT id, 0 FROM range(2000); FLUSH")
        yield running


def died(engine: EngineProcess) -> bool:
    return engine.process is not None and engine.process.poll() is not None


def whole(engine: EngineProcess, world: SinkWorld) -> None:
    """The topic holds each row of the table once, and all of them are counted (I7)."""
    wanted = Counter({r["id"]: 1 for r in engine.sql("SELECT id FROM e")})

    def there() -> Counter[int]:
        return Counter(json.loads(v or b"")["id"] for _, v in read_topic(world.bootstrap, "parts"))

    eventually(lambda: there().keys() >= wanted.keys(), "the topic never held the table")
    assert there() == wanted, "a change is in the topic more than once"
    rows = "SELECT rows FROM hw_catalog.hw_progress WHERE name = 'parts'"
    eventually(lambda: engine.sql(rows) == [{"rows": len(wanted)}], f"I7: {engine.sql(rows)} rows are counted")
    eventually(
        lambda: engine.sql("SELECT backlog_epochs AS n FROM hw_catalog.hw_log_stores") == [{"n": 0}], "a backlog stays"
    )


def staged(order: Path) -> list[int]:
    """The rows of each batch that was staged."""
    found = order.with_name("written")
    return [int(line) for line in found.read_text().split()] if found.exists() else []


@pytest.mark.slow
def test_a_snapshot_that_is_there_in_part_is_finished_by_another_number_of_producers(
    engine: EngineProcess, sink_world: SinkWorld, order: Path
) -> None:
    order.with_name("producers").write_text("4")
    order.write_text("kill 1 3")
    engine.sql(
        "CREATE SINK parts FROM e WITH (connector='python', class='killing_sink:PartlySendingSink', "
        f"python.order_file='{order}', python.connector='kafka', python.atomic='false', python.topic='parts', "
        f"python.properties.bootstrap.server='{sink_world.bootstrap}', python.topic.partitions='2', "
        f"python.staging.path='{order.parent}/staging', type='append-only')"
    )
    eventually(lambda: died(engine), "the engine was not killed")
    order.with_name("producers").write_text("3")
    engine.start()
    whole(engine, sink_world)
    first, second = staged(order)
    assert first == 2000 and 800 < second < 1200, "vnodes that were there were read again"


@pytest.mark.slow
def test_a_batch_that_is_there_in_part_is_finished_after_failures_and_a_kill(
    engine: EngineProcess, sink_world: SinkWorld, order: Path
) -> None:
    order.with_name("written").unlink()
    order.write_text("fail 0")
    engine.sql("INSERT INTO e SELECT id, 1 FROM range(10000, 10900); FLUSH")
    # The first attempt leaves a part there; the attempts after it read the rest alone, and add nothing.
    eventually(lambda: len(staged(order)) >= 3, "the sink does not try again")
    first, second, third = staged(order)[:3]
    assert first == 900 and second == third and 500 < second < 700
    engine.sql("FLUSH; FLUSH")  # checkpoints have what is known of single vnodes
    engine.kill()
    order.unlink()
    order.with_name("producers").write_text("5")
    engine.start()
    whole(engine, sink_world)
    assert staged(order)[-1] == second
    engine.sql("INSERT INTO e SELECT id, 2 FROM range(20000, 20300); FLUSH")
    whole(engine, sink_world)
    assert staged(order)[-1] == 300
