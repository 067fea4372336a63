"""The MySQL sink against a real MariaDB: character sets and collations that are not ours."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.errors import DefiniteError
from headwater.model.schema import OP, Column
from headwater.sink.batch import RowBatch
from headwater.sink.delivery import DeliveryLoop
from sink_world import SinkWorld, Target

COLUMNS = (Column("k", "STRING", nullable=False), Column("v", "INT"))


def batch(*rows: tuple[str, int | None, int]) -> RowBatch:
    columns = zip(*rows, strict=True)
    kinds = (("k", pa.string()), ("v", pa.int32()), (OP, pa.int8()))
    return RowBatch(pa.table({name: pa.array(values, t) for (name, t), values in zip(kinds, columns, strict=True)}))


def started(target: Target, generation: int = 1, **more: str) -> DeliveryLoop:
    target.options.update({k.replace("_", "."): v for k, v in more.items()})
    sink = target.open(generation, columns=COLUMNS, key=("k",))
    sink.validate(COLUMNS, ("k",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    return loop


@pytest.fixture
def latin1(sink_world: SinkWorld) -> str:
    sink_world.mariadb("CREATE DATABASE IF NOT EXISTS old DEFAULT CHARACTER SET latin1")
    return "old"


def test_a_database_of_latin1_takes_keys_and_sinks_beyond_it(sink_world: SinkWorld, latin1: str) -> None:
    target = sink_world.target("mariadb", "target_日本")
    loop = started(target, database_name=latin1)
    loop.deliver(0, 1, lambda: batch(("日本", 1, 1), ("ü", 1, 1)))
    loop.sink.close()
    again = started(target, 2)
    assert again.sink.last_committed() == 1
    again.deliver(1, 2, lambda: batch(("日本", 2, 1), ("ü", None, 2)))
    assert sink_world.mariadb("SELECT k, v FROM old.`target_日本`") == [("日本", 2)]


def test_progress_of_an_older_release_is_found_and_its_names_are_told_apart(sink_world: SinkWorld) -> None:
    sink_world.mariadb("CREATE DATABASE IF NOT EXISTS older DEFAULT CHARACTER SET latin1")
    sink_world.mariadb(
        "CREATE TABLE older.headwater_progress (sink VARCHAR(255) PRIMARY KEY, epoch BIGINT,"
        " generation BIGINT NOT NULL, committed_at TIMESTAMP) ENGINE=InnoDB"
    )
    sink_world.mariadb("INSERT INTO older.headwater_progress (sink, epoch, generation) VALUES ('target_x', 7, 1)")
    assert started(sink_world.target("mariadb", "target_x"), database_name="older").sink.last_committed() == 7
    assert started(sink_world.target("mariadb", "target_X"), database_name="older").sink.last_committed() is None


def test_a_table_of_the_users_that_takes_two_keys_as_one_loses_neither_silently(sink_world: SinkWorld) -> None:
    target = sink_world.target("mariadb")
    table = f"shop.{target.name}"
    sink_world.mariadb(
        f"CREATE TABLE {table} (k VARCHAR(20) PRIMARY KEY, v INT) CHARSET utf8mb4 COLLATE utf8mb4_general_ci"
    )
    loop = started(target)
    loop.deliver(0, 1, lambda: batch(("a", 1, 1), ("b", 1, 1)))
    for alike in ("A", "a ", "á"):
        with pytest.raises(DefiniteError) as caught:
            loop.deliver(1, 2, lambda key=alike: batch((key, 2, 1)))  # type: ignore[misc]
        assert caught.value.code == "SINK_ROW_REFUSED" and "utf8mb4_nopad_bin" in caught.value.hint
    assert sorted(sink_world.mariadb(f"SELECT k, v FROM {table}")) == [("a", 1), ("b", 1)]
    loop.deliver(1, 2, lambda: batch(("a", None, 2), ("A", 2, 1), ("b", 3, 1)))
    assert sorted(sink_world.mariadb(f"SELECT k, v FROM {table}")) == [("A", 2), ("b", 3)]


def test_a_column_keeps_its_own_character_set_while_it_is_staged(sink_world: SinkWorld, latin1: str) -> None:
    target = sink_world.target("mariadb", "target_own")
    sink_world.mariadb(
        f"CREATE TABLE {latin1}.target_own"
        " (k VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PRIMARY KEY, v INT)"
    )
    started(target, database_name=latin1).deliver(0, 1, lambda: batch(("☃", 1, 1), ("☃ ", 2, 1)))
    assert sorted(sink_world.mariadb(f"SELECT k, v FROM {latin1}.target_own"), key=repr) == [("☃ ", 2), ("☃", 1)]
