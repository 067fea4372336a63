"""What people write comes back as they wrote it, and reaches nothing else: odd texts and names, files, code, deep SQL,
past epochs. One engine for all of it."""

from __future__ import annotations

import asyncio
import csv
import gc
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater import Engine
from headwater.cli.output import print_result
from headwater.errors import UsageError
from headwater.model.schema import quoted
from headwater.model.trust import Trust
from headwater.readonly import ReadOnlyEngine
from headwater.runtime import reading
from headwater.spark import session as sessions

pytestmark = pytest.mark.spark

TEXTS = [
    "Dear ${name}, your code is ${code}.",
    "${env:PATH} ${system:user.home} ${hiveconf:x} ${spark:spark.app.name}",
    "%s %(x)s 100%",
    "{} {0} {{x}}",
    "back\\slash \\n \\\\ \\u0041 \\0",
    "it's \"so\" `q` ''",
    "nul\x00inside",
    "\ufffe\uffff\U0001fffe\U0010ffff",
    "line\nbreak\ttab\r\x85\u2028",
    "-- x /* y */ ; DROP TABLE t",
    "ünï ☃ 😀 \u202e\u200b",
    "\x1b[31m\x07",
    "",
]
NAMES = ["${x}", "${env:PATH}", "%s", "{}", "a.b", "back\\slash", "quo'te", 'd"q', "bq`x", "new\nline", "☃ 😀", "@v"]
NAMES += [":p", "1", "\ufffe", "/* c", "-- c", "$$", "tab\t"]
ODD = "odd ${env:PATH} `%s` {} \\ 'q'"
LATER = "${later}"


def literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def engine(place: Path) -> Iterator[Engine]:
    settings = {"barrier_interval_ms": "200", "vnode_count": "4"}
    with Engine(place / "data", settings=settings) as engine:
        columns = ", ".join(f"{quoted(name)} STRING" for name in NAMES)
        engine.execute(f"CREATE TABLE {quoted(ODD)} (id BIGINT PRIMARY KEY, {columns})")
        rows = [f"({i}, {', '.join([literal(text)] * len(NAMES))})" for i, text in enumerate(TEXTS)]
        engine.execute(f"INSERT INTO {quoted(ODD)} VALUES {', '.join(rows)}")
        yield engine


def one(engine: Engine, query: str) -> list[dict[str, Any]]:
    result = engine.execute(query)[-1]
    assert result is not None
    return result.rows


def expected() -> list[dict[str, Any]]:
    return [{"id": i, **dict.fromkeys(NAMES, text)} for i, text in enumerate(TEXTS)]


def code_of(engine: Engine, text: str, trust: Trust = Trust.ADMIN) -> str:
    try:
        engine.call(engine.core.sql(text, trust))
    except UsageError as error:
        return error.code
    return ""


# -- texts and names -------------------------------------------------------------------------------------------------


def test_what_is_inserted_comes_back_in_every_form(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    query = f"SELECT * FROM {quoted(ODD)} ORDER BY id"
    assert one(engine, query) == expected()
    assert [row.asDict() for row in engine.sql(query).collect()] == expected()
    result = {"columns": ["id", *NAMES], "rows": one(engine, query)}
    print_result(result, "json")
    assert json.loads(capsys.readouterr().out) == expected()
    print_result(result, "csv")
    with io.StringIO(capsys.readouterr().out, newline="") as text:
        header, *found = csv.reader(text)
    assert header == ["id", *NAMES]
    assert found == [[str(i), *[t] * len(NAMES)] for i, t in enumerate(TEXTS)]


def test_conditions_find_the_texts_and_selected_rows_keep_them(engine: Engine) -> None:
    for i, text in enumerate(TEXTS):
        name = NAMES[i % len(NAMES)]
        found = one(engine, f"SELECT id FROM {quoted(ODD)} WHERE {quoted(name)} = {literal(text)}")
        assert found == [{"id": i}], (name, text)
    engine.execute(f"CREATE TABLE copied AS SELECT * FROM {quoted(ODD)}")
    assert one(engine, "SELECT * FROM copied ORDER BY id") == expected()
    longer = " ".join(f"WHEN {i} THEN {literal(text + LATER)}" for i, text in enumerate(TEXTS))
    engine.execute(f"UPDATE copied SET {quoted(NAMES[1])} = CASE id {longer} END WHERE {quoted(NAMES[0])} IS NOT NULL")
    wanted = [{**row, NAMES[1]: row[NAMES[1]] + LATER} for row in expected()]
    assert one(engine, "SELECT * FROM copied ORDER BY id") == wanted
    engine.execute(f"DELETE FROM copied WHERE {quoted(NAMES[2])} IN ({', '.join(map(literal, TEXTS[:9]))})")
    assert one(engine, "SELECT * FROM copied ORDER BY id") == wanted[9:]


def test_views_of_every_kind_keep_texts_and_names(engine: Engine) -> None:
    table = quoted(ODD)
    grouped = ", ".join(quoted(name) for name in NAMES)
    engine.execute(f"CREATE MATERIALIZED VIEW `rows ${{x}}` AS SELECT *, {literal(LATER)} AS `${{out}}` FROM {table}")
    engine.execute(f"CREATE MATERIALIZED VIEW sums AS SELECT {grouped}, count(*) AS `n {{}}` FROM {table} GROUP BY ALL")
    engine.execute(
        f"CREATE MATERIALIZED VIEW joined AS SELECT a.id, a.{quoted(NAMES[1])}, b.{quoted(NAMES[0])} FROM {table} a "
        f"JOIN {table} b ON a.{quoted(NAMES[1])} = b.{quoted(NAMES[8])} WHERE a.{quoted(NAMES[3])} <> {literal(LATER)}"
    )
    before = engine.core.meta.committed_epoch()
    extra = TEXTS[0] + TEXTS[4] + TEXTS[6]
    engine.execute(f"INSERT INTO {table} VALUES (99, {', '.join([literal(extra)] * len(NAMES))})")
    wanted = [*expected(), {"id": 99, **dict.fromkeys(NAMES, extra)}]
    found = one(engine, "SELECT * FROM `rows ${x}` ORDER BY id")
    assert found == [{**row, "${out}": LATER} for row in wanted]
    sums = [{**{n: row[n] for n in NAMES}, "n {}": 1} for row in wanted]
    assert sorted(one(engine, "SELECT * FROM sums"), key=repr) == sorted(sums, key=repr)
    joined = [{"id": row["id"], NAMES[1]: row[NAMES[1]], NAMES[0]: row[NAMES[0]]} for row in wanted]
    assert one(engine, "SELECT * FROM joined ORDER BY id") == joined
    last = engine.core.meta.committed_epoch()
    for name in (ODD, "rows ${x}"):
        (changed,) = engine.table(name).changes(before, last).collect()
        assert {n: changed[n] for n in NAMES} == dict.fromkeys(NAMES, extra)
    engine.execute(f"DELETE FROM {table} WHERE id = 99")
    assert one(engine, "SELECT id FROM joined WHERE id = 99") == []


def test_an_error_names_what_was_written_and_no_value_of_the_environment(engine: Engine) -> None:
    with pytest.raises(UsageError) as caught:
        engine.execute(f"SELECT `${{env:PATH}}x` FROM {quoted(ODD)}")
    assert "${env:PATH}x" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        engine.execute("SELECT * FROM `${env:PATH}`")
    assert "${env:PATH}" in str(caught.value)


@pytest.mark.parametrize("text", ["'\ud800'", r"'\ud800'", r"'x\uDC00'", r"'\\\ud83d'"])
def test_half_a_character_is_refused(engine: Engine, text: str) -> None:
    with pytest.raises(UsageError, match="no characters"):
        engine.execute(f"SELECT {text}")


def test_whole_characters_may_be_written_as_two_halves(engine: Engine) -> None:
    assert one(engine, r"SELECT '\ud83d\ude00' AS a, '\\ud800' AS b") == [{"a": "😀", "b": "\\ud800"}]


def test_no_session_beside_the_main_one_substitutes_either(engine: Engine) -> None:
    spark = engine.core.spark
    beside = [sessions.careful_session(spark), sessions.quick_session(spark, 2, interpreted=True)]
    for found in [spark, *beside, *sessions._beside.values()]:
        assert found.conf.get("spark.sql.variable.substitute") == "false"
        assert found.sql("SELECT '${env:PATH}' AS a").collect()[0].a == "${env:PATH}"


# -- trust -----------------------------------------------------------------------------------------------------------


def test_the_admin_token_reads_no_file_and_calls_no_code(engine: Engine, place: Path) -> None:
    engine.execute("CREATE TABLE IF NOT EXISTS notes (id BIGINT PRIMARY KEY, body STRING)")
    secret = place / "only_mine.txt"
    secret.write_text("CANARY")
    path = f"text.`{secret}`"
    headers = {"Authorization": f"Bearer {engine.core.endpoint.token}"}
    with httpx.Client(base_url=engine.core.endpoint.url, headers=headers, trust_env=False, timeout=60) as http:
        for text in (
            f"SELECT * FROM {path}",
            f"SELECT * FROM IDENTIFIER('{path}')",
            f"SELECT * FROM explode((SELECT collect_list(value) FROM {path}))",
            f"INSERT INTO notes SELECT 1, 'x' WHERE EXISTS (SELECT 1 FROM {path})",
            f"SELECT TRANSFORM(a) USING 'cat {secret}' AS (b) FROM VALUES (1) AS t(a)",
            "SELECT reflect('java.lang.System', 'getenv', 'PATH')",
            "CREATE FUNCTION sh RETURNS INT LANGUAGE PYTHON AS 'os:system'",
            f"CREATE SINK s FROM {quoted(ODD)} WITH (connector='Python', class='os:x')",
            f"CREATE SOURCE s WITH (connector='postgres-cdc', hostname='h', password='${{file:{secret}}}')",
            f"CREATE SINK s FROM {quoted(ODD)} WITH (connector='iceberg', catalog.py-io-impl='os.x')",
        ):
            answer = http.post("/sql", json={"statement": text})
            assert answer.status_code == 400, text
            assert "CANARY" not in answer.text
    with pytest.raises(Exception, match=r"TABLE_OR_VIEW_NOT_FOUND|UNSUPPORTED"):  # were it not for the parser
        engine.core.spark.sql(f"SELECT * FROM {path}").collect()


def test_code_comes_from_the_owner_or_to_an_engine_that_allows_it(engine: Engine, place: Path) -> None:
    (place / "mine.py").write_text("def twice(n):\n    return 2 * n\n")
    text = f"CREATE OR REPLACE FUNCTION twice RETURNS BIGINT LANGUAGE PYTHON AS '{place / 'mine.py'}:twice'"
    assert code_of(engine, text) == "CODE_NOT_ALLOWED"
    engine.execute(text)
    assert code_of(engine, "SELECT twice(id) FROM range(2)", Trust.READ) == ""
    engine.core.allow_python = True
    try:
        assert code_of(engine, text) == ""
        assert code_of(engine, text, Trust.READ) == "READ_ONLY_TOKEN"
    finally:
        engine.core.allow_python = False


def test_the_read_token_looks_and_changes_nothing(engine: Engine) -> None:
    table = quoted(ODD)
    for text in (f"SELECT id FROM {table}", "SHOW JOBS", f"DESCRIBE {table}", f"EXPLAIN SELECT id FROM {table}"):
        assert code_of(engine, text, Trust.READ) == ""
    for text in (
        f"DELETE FROM {table}",
        f"SELECT 1; DROP TABLE {table} CASCADE",
        "CREATE TABLE x (id INT)",
        "PAUSE",
        "FLUSH",
        "RECOVER",
        "ALTER SYSTEM SET retention_s = 0",
        "CANCEL JOBS 1",
        "REWIND s TO 1",
    ):
        assert code_of(engine, text, Trust.READ) == "READ_ONLY_TOKEN"
    assert len(one(engine, f"SELECT id FROM {table}")) == len(TEXTS)


# -- deep and long ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 500 + "1" + ")" * 500,
        "SELECT " + "abs(" * 45 + "1" + ")" * 45,
        "SELECT " + "- " * 900 + "1",
        "SELECT " + "NOT " * 150 + "true",
        " UNION ALL ".join(["SELECT 1"] * 3000),
        "SELECT " + " + ".join(["1"] * 20_000),
        "INSERT INTO notes VALUES (1, " + "upper(" * 48 + "'x'" + ")" * 48 + ")",
    ],
)
def test_what_is_too_deep_for_anybody_is_the_users_error(engine: Engine, text: str) -> None:
    engine.execute("CREATE TABLE IF NOT EXISTS notes (id BIGINT PRIMARY KEY, body STRING)")
    assert code_of(engine, text) in ("", "SQL_TOO_DEEP")


def test_a_long_chain_of_conditions_is_no_matter_for_spark_s_parser(engine: Engine) -> None:
    flat = " OR ".join(f"id = {i}" for i in range(6000))  # to run it takes Spark longer than to read it
    assert engine.sql(f"SELECT id FROM {quoted(ODD)} WHERE {flat}").columns == ["id"]


# -- past epochs -----------------------------------------------------------------------------------------------------


def test_a_past_epoch_stays_as_long_as_somebody_reads_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LEASE_S", -1.0)
    engine.core.queries.reading._leases.clear()  # of frames before, each for a minute
    engine.core.queries.reading.epochs.clear()
    engine.execute("CREATE TABLE past (id BIGINT PRIMARY KEY, v STRING); INSERT INTO past VALUES (1, 'old'); FLUSH")
    first = engine.core.meta.committed_epoch()
    engine.execute("UPDATE past SET v = 'new'; FLUSH")
    last = engine.core.meta.committed_epoch()
    held = engine.table("past").df(first)
    changes = engine.table("past").changes(first, last)
    queried = engine.sql(f"SELECT v FROM past VERSION AS OF {first}")
    engine.execute("ALTER SYSTEM SET retention_s = 0")
    try:
        for _ in range(3):  # a whole table again, and what was before it is swept unless somebody reads it
            engine.execute("DELETE FROM past; INSERT INTO past VALUES (1, 'newer'); FLUSH")
            (state,) = [s for s in engine.core.dataflow.states() if s.job.name == "past"]
            segments = engine.call(engine.core.maintenance._committed(state))
            engine.call(engine.core.maintenance._fold(state, segments))
            engine.execute("FLUSH")
            engine.call(engine.core.maintenance.collect_garbage())
        assert [row.v for row in held.collect()] == ["old"]
        assert [row.v for row in queried.collect()] == ["old"]
        assert sorted(row["_change_type"] for row in changes.collect()) == ["update_postimage", "update_preimage"]
        del held, changes, queried
        gc.collect()
        engine.call(engine.core.maintenance.collect_garbage())
        with pytest.raises(UsageError, match="EPOCH_NOT_AVAILABLE"):
            engine.table("past").df(first)
        assert engine.core.queries.reading.held() == []
    finally:
        engine.execute("ALTER SYSTEM SET retention_s = DEFAULT")


# -- without an engine: the last test, for it ends the engine ----------------------------------------------------------


def test_without_an_engine_nothing_is_substituted_either(engine: Engine, place: Path) -> None:
    engine.__exit__()
    with ReadOnlyEngine(place / "data") as reader:
        (result,) = asyncio.run(reader.commands.execute(f"SELECT * FROM {quoted(ODD)} ORDER BY id"))
        assert result is not None
        assert result.rows == expected()
        (result,) = asyncio.run(reader.commands.execute("SELECT '${env:PATH}' AS a"))
        assert result is not None
        assert result.rows == [{"a": "${env:PATH}"}]
