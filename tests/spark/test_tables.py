"""Tables through SQL, against one engine in a process of its own (DESIGN.md sections 6 and 10)."""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine_process import EngineProcess, SqlError, headwater, running, wait_until
from headwater.connectors.files.sink import read_table

pytestmark = pytest.mark.spark
_numbers = itertools.count(1)

CATALOGUE = {
    "hw_jobs": "id name kind state lane definition",
    "hw_progress": "job_id name phase done total percent rows bytes rows_per_s eta_s waiting_for",
    "hw_epochs": "epoch kind committed_at source position",
    "hw_sources": "name connector position acknowledged lag_bytes lag_s retained_bytes",
    "hw_splits": "table_name split_id left right state row_count offset_low offset_high handed_over_epoch",
    "hw_segments": "table_name path kind rows bytes added_epoch removed_epoch",
    "hw_log_stores": "sink backlog_rows backlog_bytes backlog_epochs truncated_to delivered_to",
    "hw_errors": "at job_id name code message hint retrying ended_at",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running(tmp_path_factory.mktemp("tables") / "data", "--set", "barrier_interval_ms=300") as found:
        yield found


@pytest.fixture
def name() -> str:
    """A table's name that no other test has."""
    return f"t{next(_numbers)}"


def refused(engine: EngineProcess, statement: str) -> str:
    with pytest.raises(SqlError) as caught:
        engine.sql(statement)
    return caught.value.code


# -- values ----------------------------------------------------------------------------------------------------------


def test_every_type_comes_back_as_it_was_written_and_spelt_as_json_format_says(
    engine: EngineProcess, name: str
) -> None:
    engine.sql(
        f"""CREATE TABLE {name} (id BIGINT PRIMARY KEY, b BOOLEAN, t TINYINT, s SMALLINT, i INT, f FLOAT, d DOUBLE,
            n DECIMAL(38,10), x STRING, y BINARY, dt DATE, ts TIMESTAMP, tn TIMESTAMP_NTZ, arr ARRAY<INT>,
            st STRUCT<p: INT, q: STRING>, m MAP<STRING, INT>, ats ARRAY<TIMESTAMP>)"""
    )
    row = """true, -128, 32767, 2147483647, 1.5, 0.1, 1234567890123456789012345678.0123456789, 'x''y', X'00FF',
             DATE '2026-01-02', TIMESTAMP '2026-01-02 03:04:05.678901+02:00',
             TIMESTAMP_NTZ '2026-01-02 03:04:05.678901', array(1, NULL), named_struct('p', 1, 'q', 'z'), map('k', 7),
             array(TIMESTAMP '2026-01-02 03:04:05.000001+02:00')"""
    engine.sql(f"INSERT INTO {name} VALUES (9007199254740993, {row})")
    engine.sql(f"INSERT INTO {name} SELECT 2, {row}")
    expected: dict[str, Any] = {
        "b": True,
        "t": -128,
        "s": 32767,
        "i": 2147483647,
        "f": 1.5,
        "d": 0.1,
        "n": "1234567890123456789012345678.0123456789",
        "x": "x'y",
        "y": base64.b64encode(b"\x00\xff").decode(),
        "dt": "2026-01-02",
        "ts": "2026-01-02T01:04:05.678901Z",
        "tn": "2026-01-02T03:04:05.678901",
        "arr": [1, None],
        "st": {"p": 1, "q": "z"},
        "m": {"k": 7},
        "ats": ["2026-01-02T01:04:05.000001Z"],
    }
    assert engine.sql(f"SELECT * FROM {name} ORDER BY id") == [
        {"id": 2, **expected},
        {"id": 9007199254740993, **expected},
    ]


def test_texts_with_a_length_are_strings(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} (k VARCHAR(3) PRIMARY KEY, c CHAR(2), a ARRAY<VARCHAR(2)>)")
    engine.sql(f"INSERT INTO {name} VALUES ('a', 'b', array('long'))")
    assert engine.sql(f"SELECT * FROM {name} WHERE k = 'a'") == [{"k": "a", "c": "b", "a": ["long"]}]


def test_nan_and_infinities_are_strings_and_nulls_are_null(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} (id INT PRIMARY KEY, d DOUBLE, dt DATE)")
    engine.sql(f"INSERT INTO {name} VALUES (1, double('NaN'), NULL), (2, double('-Infinity'), DATE '0001-01-01')")
    assert engine.sql(f"SELECT * FROM {name} ORDER BY id") == [
        {"id": 1, "d": "NaN", "dt": None},
        {"id": 2, "d": "-Infinity", "dt": "0001-01-01"},
    ]


def test_dates_that_python_does_not_have_can_be_written_as_values(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} (id INT PRIMARY KEY, d DATE, n TIMESTAMP_NTZ, a ARRAY<TIMESTAMP>, e ARRAY<DATE>)")
    far = "DATE'-0043-03-15', TIMESTAMP_NTZ'+12024-03-15 00:00:00', array(TIMESTAMP'+12024-03-15 00:00:00')"
    engine.sql(f"INSERT INTO {name} (id, d, n) VALUES (1, DATE'-0043-03-15', TIMESTAMP_NTZ'+12024-03-15 00:00:00')")
    engine.sql(f"INSERT INTO {name} VALUES (2, {far}, array(DATE'-0043-03-15', NULL))")
    spelt = {"d": "0044-03-15 BC", "n": "12024-03-15T00:00:00.000000"}
    nested = {"a": ["12024-03-15T00:00:00.000000Z"], "e": ["0044-03-15 BC", None]}
    rows = engine.sql(f"SELECT * FROM {name} ORDER BY id")
    assert rows == [{"id": 1, **spelt, "a": None, "e": None}, {"id": 2, **spelt, **nested}]


def test_two_result_columns_of_one_name_stay_two(engine: EngineProcess, name: str) -> None:
    assert engine.sql("SELECT 1 AS x, 2 AS x") == [{"x": 1, "x_2": 2}]
    engine.sql(f"CREATE TABLE {name} (a INT PRIMARY KEY, b INT); INSERT INTO {name} SELECT 1 AS x, 2 AS x")
    assert engine.sql(f"SELECT * FROM {name}") == [{"a": 1, "b": 2}]


def test_cli_prints_one_json_array_a_query_and_nothing_for_other_statements(engine: EngineProcess, name: str) -> None:
    text = (
        f"CREATE TABLE {name} (id INT PRIMARY KEY); INSERT INTO {name} VALUES (1); SELECT * FROM {name}; SELECT 2 AS b"
    )
    done = headwater("sql", "-c", text, "--format", "json", data_dir=engine.data_dir)
    assert (done.returncode, done.stdout) == (0, '[{"id":1}]\n[{"b":2}]\n')


# -- writing ---------------------------------------------------------------------------------------------------------


def test_of_several_rows_with_one_key_the_last_stays(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} (id INT PRIMARY KEY, v STRING)")
    engine.sql(f"INSERT INTO {name} VALUES (1, 'a'), (1, 'b'), (2, 'c'), (1, 'd')")
    assert engine.sql(f"SELECT * FROM {name} ORDER BY id") == [{"id": 1, "v": "d"}, {"id": 2, "v": "c"}]


def test_a_table_without_a_key_keeps_equal_rows_and_each_can_be_changed(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} (v INT, w STRING)")
    engine.sql(
        f"INSERT INTO {name} VALUES (1, 'a'), (1, 'a'), (2, NULL); INSERT INTO {name} SELECT 1, 'a' FROM range(2)"
    )
    assert len(engine.sql(f"SELECT * FROM {name}")) == 5
    engine.sql(f"UPDATE {name} SET v = 7 WHERE w IS NULL")
    engine.sql(f"DELETE FROM {name} WHERE w = 'a'")
    assert engine.sql(f"SELECT * FROM {name}") == [{"v": 7, "w": None}]


def test_an_update_of_the_key_moves_the_row_also_onto_keys_that_move_themselves(
    engine: EngineProcess, name: str
) -> None:
    engine.sql(f"CREATE TABLE {name} (a INT, b STRING, v INT, PRIMARY KEY (a, b))")
    engine.sql(f"INSERT INTO {name} VALUES (1, 'x', 10), (2, 'x', 20), (3, 'x', 30), (1, 'y', 40)")
    engine.sql(f"UPDATE {name} SET a = a + 1 WHERE b = 'x'")
    rows = engine.sql(f"SELECT a, b, v FROM {name} ORDER BY v")
    assert [(r["a"], r["b"], r["v"]) for r in rows] == [(2, "x", 10), (3, "x", 20), (4, "x", 30), (1, "y", 40)]


def test_names_that_need_quotes_work_in_every_statement(engine: EngineProcess, name: str) -> None:
    table = f"`{name} select`"
    engine.sql(f"CREATE TABLE {table} (`a b` INT PRIMARY KEY, `from` STRING)")
    engine.sql(f"INSERT INTO {table} (`from`, `a b`) VALUES ('x', 1), ('y', 2)")
    engine.sql(f"UPDATE {table} SET `from` = concat(`from`, '!') WHERE `a b` = 1; DELETE FROM {table} WHERE `a b` = 2")
    assert engine.sql(f"SELECT t.`from` FROM {table} t WHERE t.`a b` = 1") == [{"from": "x!"}]
    engine.sql(f"DROP TABLE {table}")


def test_names_may_begin_with_an_underscore(engine: EngineProcess, name: str, tmp_path: Path) -> None:
    table, view = f"_{name}", f"_v_{name}"
    columns = "_old__id INT, _epoch INT, _at INT, _row INT, _new INT, _was INT, _metadata INT, _v STRING"
    engine.sql(f"CREATE TABLE {table} (_id INT PRIMARY KEY, {columns}); FLUSH")
    engine.sql(f"CREATE MATERIALIZED VIEW {view} AS SELECT _v, sum(_at) AS _n FROM {table} GROUP BY _v; WAIT")
    engine.sql(f"CREATE SINK _s_{name} FROM {table} WITH (connector='files', path='{tmp_path}', primary_key='_row')")
    before = engine.epoch()
    engine.sql(f"INSERT INTO {table} VALUES (1, 2, 3, 4, 5, 6, 7, 8, 'x'), (2, 2, 3, 4, 6, 6, 7, 8, 'y'); FLUSH")
    engine.sql(
        f"UPDATE {table} SET _id = _id + 10, _epoch = 0 WHERE _v = 'x'; DELETE FROM {table} WHERE _id = 2; FLUSH"
    )
    row = {"_id": 11, "_old__id": 2, "_epoch": 0, "_at": 4, "_row": 5, "_new": 6, "_was": 7, "_metadata": 8, "_v": "x"}
    assert engine.sql(f"SELECT * FROM {table}") == [row]
    assert engine.sql(f"SELECT * FROM {view}") == [{"_v": "x", "_n": 4}]
    changes = engine.sql(f"SELECT * FROM table_changes('{table}', {before}, {engine.epoch()})")
    kept = [(c["_id"], c["_epoch"], c["_change_type"]) for c in changes]
    assert sorted(kept) == [(1, 3, "delete"), (1, 3, "insert"), (2, 3, "delete"), (2, 3, "insert"), (11, 0, "insert")]
    wait_until(lambda: read_table(tmp_path).to_pylist() == [row])
    engine.sql(f"DROP TABLE {table} CASCADE")


def test_names_may_hold_dots_and_backquotes(engine: EngineProcess, name: str, tmp_path: Path) -> None:
    table = f"`{name}``x`"
    engine.sql(f"CREATE TABLE {table} (`k``.k` INT PRIMARY KEY, `a.b` STRING, `c``` INT); FLUSH")
    before = engine.epoch()
    engine.sql(f"INSERT INTO {table} VALUES (1, 'x', 2), (2, 'y', 3); FLUSH")
    engine.sql(f"UPDATE {table} SET `c``` = `c``` + 1, `k``.k` = `k``.k` + 10 WHERE `a.b` = 'x'; FLUSH")
    engine.sql(f"DELETE FROM {table} WHERE `k``.k` = 2; FLUSH")
    assert engine.sql(f"SELECT * FROM {table}") == [{"k`.k": 11, "a.b": "x", "c`": 3}]
    changes = engine.sql(f"SELECT * FROM table_changes('{name}`x', {before}, {engine.epoch()})")
    assert sorted((c["k`.k"], c["_change_type"]) for c in changes) == [
        (1, "delete"),
        (1, "insert"),
        (2, "delete"),
        (2, "insert"),
        (11, "insert"),
    ]
    engine.sql(
        f"CREATE MATERIALIZED VIEW v_{name} AS SELECT `a.b`, sum(`c```) AS `s``` FROM {table} GROUP BY `a.b`; WAIT"
    )
    engine.sql(f"INSERT INTO {table} VALUES (3, 'x', 4); FLUSH")
    assert engine.sql(f"SELECT * FROM v_{name}") == [{"a.b": "x", "s`": 7}]
    engine.sql(f"CREATE SINK s_{name} FROM {table} WITH (connector='files', path='{tmp_path}', type='upsert')")
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.1)
    (file,) = tmp_path.rglob("*.parquet")
    assert pq.read_table(file).drop_columns(["_op"]).to_pylist() == engine.sql(f"SELECT * FROM {table} ORDER BY 1")
    engine.sql(f"DROP TABLE {table} CASCADE")


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("INSERT INTO {t} VALUES (NULL, 'x')", "NOT_NULL"),
        ("INSERT INTO {t} SELECT CAST(NULL AS INT), 'x' FROM range(3)", "NOT_NULL"),
        ("INSERT INTO {t} (v) VALUES ('x')", "NOT_NULL"),
        ("UPDATE {t} SET id = NULL", "NOT_NULL"),
        ("INSERT INTO {t} VALUES ('no number', 'x')", "QUERY_FAILED"),
        ("INSERT INTO {t} VALUES (99999999999, 'x')", "QUERY_FAILED"),
        ("INSERT INTO {t} VALUES (1)", "COLUMN_COUNT"),
        ("INSERT INTO {t} (id, nosuch) VALUES (1, 2)", "UNKNOWN_COLUMN"),
        ("UPDATE {t} SET nosuch = 1", "UNKNOWN_COLUMN"),
        ("INSERT INTO nosuch VALUES (1)", "UNKNOWN_TABLE"),
        ("SELECT * FROM nosuch", "UNKNOWN_TABLE"),
        ("SELECT nosuch FROM {t}", "SQL_INVALID"),
        ("SELEC 1", "SQL_SYNTAX"),
        ("SELECT 1 / 0", "QUERY_FAILED"),
        ("CREATE TABLE {t} (id INT)", "ALREADY_EXISTS"),
        ("CREATE TABLE other (a INT, A INT)", "DUPLICATE_COLUMN"),
        ("CREATE TABLE other (_hw_a INT)", "RESERVED_NAME"),
        ("CREATE TABLE other (a INT PRIMARY KEY, b INT, PRIMARY KEY (b))", "SQL_SYNTAX"),
        ("CREATE TABLE other (a ARRAY<INT> PRIMARY KEY)", "KEY_TYPE"),
        ("CREATE TABLE other (a INT) WITH (nosuch = '1')", "UNKNOWN_OPTION"),
        ("CREATE TABLE other (a DECIMAL(5, 7))", "UNKNOWN_TYPE"),
        ("CREATE TABLE other AS SELECT id, id FROM {t}", "DUPLICATE_COLUMN"),
        ("CREATE TABLE other AS SELECT id AS _seq FROM {t}", "RESERVED_NAME"),
        ("CREATE TABLE other AS SELECT id, NULL AS n FROM {t}", "UNKNOWN_TYPE"),
        ("CREATE TABLE other AS SELECT 1 / (id - id) AS x FROM {t}", "QUERY_FAILED"),
        ("UPDATE {t} SET v = 'a', v = 'b'", "DUPLICATE_COLUMN"),
        ("SELECT * FROM hw_catalog.nosuch", "UNKNOWN_TABLE"),
        ("SELECT * FROM {t} VERSION AS OF 5", "EPOCH_NOT_AVAILABLE"),
        ("SELECT * FROM {t} TIMESTAMP AS OF '2020-01-01 00:00:00'", "EPOCH_NOT_AVAILABLE"),
        ("SELECT * FROM table_changes('{t}', 5, 4)", "EPOCH_RANGE"),
        ("ALTER SYSTEM SET nosuch = 1", "UNKNOWN_PARAMETER"),
        ("SET dialect = 'nosuch'", "UNKNOWN_DIALECT"),
    ],
)
def test_a_wrong_statement_is_refused_with_its_code_and_changes_nothing(
    engine: EngineProcess, refusing_table: str, statement: str, code: str
) -> None:
    assert refused(engine, statement.format(t=refusing_table)) == code


@pytest.fixture(scope="module")
def refusing_table(engine: EngineProcess) -> Iterator[str]:
    engine.sql("CREATE TABLE refusing (id INT PRIMARY KEY, v STRING); INSERT INTO refusing VALUES (1, 'kept')")
    yield "refusing"
    assert engine.sql("SELECT * FROM refusing") == [{"id": 1, "v": "kept"}]
    assert "other" not in {r["name"] for r in engine.sql("SHOW TABLES")}


def test_an_error_never_holds_a_row_s_value(engine: EngineProcess) -> None:
    with pytest.raises(SqlError) as caught:
        engine.sql("SELECT CAST('s3cret-value' AS INT)")
    assert "s3cret" not in json.dumps([caught.value.message, caught.value.detail, caught.value.hint])
    assert "s3cret" not in engine.log.read_text(errors="replace")


def test_the_first_statement_that_fails_ends_a_text_and_the_earlier_ones_stay(engine: EngineProcess, name: str) -> None:
    text = f"CREATE TABLE {name} (id INT); INSERT INTO {name} VALUES (1); SELECT nosuch; INSERT INTO {name} VALUES (2)"
    assert refused(engine, text) == "SQL_INVALID"
    assert engine.sql(f"SELECT * FROM {name}") == [{"id": 1}]


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_read_sees_every_acknowledged_write(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} (id INT PRIMARY KEY)")
    for i in range(5):
        engine.sql(f"INSERT INTO {name} VALUES ({i})")
        assert engine.sql(f"SELECT count(*) AS n FROM {name}") == [{"n": i + 1}]


def test_past_epochs_and_moments_read_as_they_were_and_changes_lead_from_one_to_the_next(
    engine: EngineProcess, name: str
) -> None:
    engine.sql(f"CREATE TABLE {name} (id INT PRIMARY KEY, v STRING, at TIMESTAMP); FLUSH")
    start = engine.epoch()
    at = "TIMESTAMP '2026-01-01 00:00:00.00000{}'"
    engine.sql(f"INSERT INTO {name} VALUES (1, 'a', {at.format(1)}), (2, 'b', NULL); FLUSH")
    first, moment = engine.epoch(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() + 1))
    time.sleep(1.2)
    engine.sql(f"INSERT INTO {name} VALUES (1, 'a', {at.format(2)}), (3, 'c', NULL), (2, 'b', NULL); FLUSH")
    second = engine.epoch()
    engine.sql(f"DELETE FROM {name} WHERE id = 1; UPDATE {name} SET id = 9 WHERE id = 3; FLUSH")
    last = engine.epoch()
    assert [r["id"] for r in engine.sql(f"SELECT id FROM {name} VERSION AS OF {start}")] == []
    assert [r["id"] for r in engine.sql(f"SELECT id FROM {name} VERSION AS OF {first} ORDER BY id")] == [1, 2]
    assert [r["id"] for r in engine.sql(f"SELECT id FROM {name} TIMESTAMP AS OF '{moment}' ORDER BY id")] == [1, 2]
    assert [r["id"] for r in engine.sql(f"SELECT id FROM {name} VERSION AS OF {second} ORDER BY id")] == [1, 2, 3]
    assert [r["id"] for r in engine.sql(f"SELECT id FROM {name} ORDER BY id")] == [2, 9]
    changes = engine.sql(f"SELECT * FROM table_changes('{name}', {start}, {last})")
    assert all(start < r["_commit_version"] <= last for r in changes)
    found = sorted((r["_commit_version"] > first, r["_change_type"], r["id"]) for r in changes)
    assert found == [
        (False, "insert", 1),
        (False, "insert", 2),
        (True, "delete", 1),
        (True, "delete", 3),
        (True, "insert", 3),
        (True, "insert", 9),
        (True, "update_postimage", 1),
        (True, "update_preimage", 1),
    ]
    images = {r["_change_type"]: r["at"] for r in changes if r["_change_type"].startswith("update")}
    assert images == {
        "update_preimage": "2026-01-01T00:00:00.000001Z",
        "update_postimage": "2026-01-01T00:00:00.000002Z",
    }
    later = engine.sql(f"SELECT id FROM table_changes('{name}', {second}, {last}) WHERE _change_type = 'delete'")
    assert sorted(r["id"] for r in later) == [1, 3]
    with pytest.raises(SqlError, match="EPOCH_NOT_AVAILABLE") as caught:
        engine.sql(f"SELECT * FROM {name} VERSION AS OF {last + 1}")
    assert "retained" in caught.value.detail


def test_a_query_reads_all_its_tables_at_one_epoch(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} (id INT PRIMARY KEY, v INT); INSERT INTO {name} VALUES (1, 1), (2, 2)")
    rows = engine.sql(f"WITH q AS (SELECT * FROM {name}) SELECT a.id FROM q a JOIN {name} b USING (id) ORDER BY id")
    assert [r["id"] for r in rows] == [1, 2]


def test_a_table_can_be_made_from_a_query_and_dropped_and_made_again(engine: EngineProcess, name: str) -> None:
    engine.sql(f"CREATE TABLE {name} AS SELECT id, id * 2 AS twice FROM range(4)")
    assert engine.sql(f"SELECT sum(twice) AS s FROM {name}") == [{"s": 12}]
    engine.sql(f"DROP TABLE {name}; CREATE TABLE {name} (v STRING)")
    assert engine.sql(f"SELECT * FROM {name}") == []
    assert refused(engine, "DROP TABLE nosuch") == "UNKNOWN_TABLE"
    assert engine.sql("DROP TABLE IF EXISTS nosuch") == []


def test_other_dialects_are_translated(engine: EngineProcess) -> None:
    assert engine.sql("SET dialect = 'postgres'; SELECT '7'::int + 1 AS v") == [{"v": 8}]


def test_an_array_is_in_the_order_that_is_asked_for(engine: EngineProcess) -> None:
    rows = "(VALUES (1, 'b', 3), (2, 'a', 1), (3, 'c', 1), (4, NULL, 2), (5, 'd', NULL)) AS t(id, x, k)"
    assert engine.sql(f"SELECT array_agg(x ORDER BY k, id DESC) AS a FROM {rows}") == [{"a": ["d", "c", "a", "b"]}]
    query = f"SELECT array_agg(x ORDER BY k DESC NULLS LAST, x) FILTER (WHERE id > 1) AS a FROM {rows}"
    assert engine.sql(f"SET dialect = 'postgres'; {query}") == [{"a": [None, "a", "c", "d"]}]
    query = f"SELECT array_agg(DISTINCT k ORDER BY k DESC) AS a FROM {rows}"
    assert engine.sql(query) == [{"a": [3, 2, 1]}]


def test_a_lateral_view_may_stand_before_a_join(engine: EngineProcess) -> None:
    rows = "(VALUES (1, array(7, 8)), (2, array())) AS t(id, a)"
    other = "(VALUES (8, 'b'), (9, 'c')) AS u(n, b)"
    query = f"SELECT id, y, b FROM {rows} LATERAL VIEW explode(a) x AS y FULL JOIN {other} ON n = y"
    found = engine.sql(f"{query} ORDER BY y NULLS LAST")
    assert [(r["id"], r["y"], r["b"]) for r in found] == [(1, 7, None), (1, 8, "b"), (None, None, "c")]


def test_intervals_are_shown_in_sparks_words(engine: EngineProcess) -> None:
    months, days = "INTERVAL '1-2' YEAR TO MONTH", "INTERVAL '3 04:05:06' DAY TO SECOND"
    (row,) = engine.sql(f"SELECT {months} AS m, {days} AS d, array({months}) AS a, make_interval(1, 2) AS i, 7 AS n")
    assert row == {"m": months, "d": days, "a": [months], "i": "1 years 2 months", "n": 7}


def test_system_parameters_go_back_to_their_default(engine: EngineProcess) -> None:
    value = "SELECT 1; SHOW PARAMETERS"
    engine.sql("ALTER SYSTEM SET retention_s = 7")
    assert {r["name"]: r["value"] for r in engine.sql(value)}["retention_s"] == 7
    engine.sql("ALTER SYSTEM SET retention_s = DEFAULT")
    assert {r["name"]: r["value"] for r in engine.sql(value)}["retention_s"] == 3600
    assert refused(engine, "ALTER SYSTEM SET vnode_count = DEFAULT") == "PARAMETER_FIXED"
    assert refused(engine, "ALTER SYSTEM SET nosuch = DEFAULT") == "UNKNOWN_PARAMETER"


def test_a_recovery_that_was_asked_for_is_no_error(engine: EngineProcess) -> None:
    engine.sql("RECOVER")
    assert "RECOVER_REQUESTED" not in engine.http.get("/metrics").text
    assert engine.sql("SELECT * FROM hw_catalog.hw_errors WHERE code = 'RECOVER_REQUESTED'") == []


@pytest.mark.parametrize("table", sorted(CATALOGUE))
def test_catalogue_tables_have_the_columns_of_the_contract(engine: EngineProcess, table: str) -> None:
    answer = engine.http.post("/sql", json={"statement": f"SELECT * FROM hw_catalog.{table}"}).json()
    assert answer["columns"] == CATALOGUE[table].split()
    assert [r["column"] for r in engine.sql(f"DESCRIBE hw_catalog.{table}")] == CATALOGUE[table].split()


def test_catalogue_tells_of_a_table(engine: EngineProcess, name: str) -> None:
    definition = f"CREATE TABLE {name} (id INT PRIMARY KEY)"
    engine.sql(f"{definition}; INSERT INTO {name} VALUES (1), (2); FLUSH")
    job = engine.sql(f"SELECT kind, state, lane, definition FROM hw_catalog.hw_jobs WHERE name = '{name}'")
    assert job == [{"kind": "table", "state": "live", "lane": "main", "definition": definition}]
    query = f"SELECT sum(rows) AS n FROM hw_catalog.hw_segments WHERE table_name = '{name}' AND removed_epoch IS NULL"
    assert engine.sql(query) == [{"n": 2}]
    last = engine.sql("SELECT max(epoch) AS e FROM hw_catalog.hw_epochs")[0]["e"]
    assert last <= engine.epoch()


def test_a_damaged_file_is_named_and_other_tables_are_not_concerned(engine: EngineProcess, name: str) -> None:
    for table in (name, f"{name}_other"):
        engine.sql(f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, v STRING)")
        engine.sql(f"INSERT INTO {table} SELECT id, 'x' FROM range(1000); FLUSH")
    row = engine.sql(f"SELECT path FROM hw_catalog.hw_segments WHERE table_name = '{name}'")[0]
    file = engine.data_dir / row["path"]
    content = file.read_bytes()
    for broken, code in ((content[:1000], "SEGMENT_DAMAGED"), (None, "SEGMENT_MISSING")):
        file.write_bytes(broken) if broken else file.unlink()
        with pytest.raises(SqlError, match=code + r".*" + file.name):
            engine.sql(f"SELECT max(v) FROM {name}")
        assert engine.sql(f"SELECT count(*) AS n FROM {name}_other") == [{"n": 1000}]
    file.write_bytes(content)
    assert engine.sql(f"SELECT count(v) AS n FROM {name}") == [{"n": 1000}]
