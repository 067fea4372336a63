"""The spelling of results and progress in the terminal."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import logging

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from headwater.cli.commands import JsonFormatter, app
from headwater.cli.live import bar, duration, plain_line
from headwater.cli.output import print_result
from headwater.runtime.spelling import json_column, json_value, unique_names

RESULT = {
    "columns": ["id", "v"],
    "rows": [{"id": 1, "v": 'a "b"'}, {"id": 2, "v": None}, {"id": 3, "v": [1, {"x": True}]}],
}


def test_json_is_one_array_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT, "json")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == RESULT["rows"]
    rows = [{"v": "a\u2028b\u2029c\x85d\x1e\x0b\r\n é"}]
    print_result({"columns": ["v"], "rows": rows}, "json")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        rows
    ]  # what else ends a line for some


def test_csv_quotes_what_it_must_and_leaves_null_empty(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT, "csv")
    assert capsys.readouterr().out == 'id,v\n1,"a ""b"""\n2,\n3,"[1, {""x"": true}]"\n'


def test_csv_tells_null_from_an_empty_text(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"a": None, "b": ""}, {"a": "", "b": None}, {"a": "NULL", "b": "x\ny"}, {"a": " ", "b": False}]
    print_result({"columns": ["a", "b"], "rows": rows}, "csv")
    assert capsys.readouterr().out == 'a,b\n,""\n"",\nNULL,"x\ny"\n ,false\n'


def test_a_table_lines_up_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"columns": ["id"], "rows": [{"id": 10}]}, "table")
    assert capsys.readouterr().out == "id\n--\n10\n(1 row)\n"
    print_result({"columns": ["id"], "rows": []}, "table")
    assert capsys.readouterr().out.endswith("(0 rows)\n")
    print_result({"columns": ["a", "b"], "rows": [{"a": "x\ny", "b": 1}, {"a": "", "b": 2}]}, "table")
    assert capsys.readouterr().out == "a  b\n-  -\nx  1\ny\n   2\n(2 rows)\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**63 - 1, 2**63 - 1),
        (decimal.Decimal("1E+3"), "1000"),
        (decimal.Decimal("0.10"), "0.10"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (0.1, 0.1),
        (b"\x00\xff", "AP8="),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (dt.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05.000000"),
        (dt.datetime(2026, 1, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=2))), "2026-01-02T01:00:00.000000Z"),
        ([1, None, {"a": decimal.Decimal("1.5")}], [1, None, {"a": "1.5"}]),
    ],
)
def test_values_are_spelt_as_the_contract_says(value: object, text: object) -> None:
    assert json_value(value) == text


def test_arrow_columns_are_spelt_the_same_with_far_moments_and_nested_ones() -> None:
    instant = pa.timestamp("us", tz="UTC")
    far = pa.array([2**63 - 1, None, 0], pa.int64()).cast(instant)
    assert json_column(far) == ["infinity", None, "1970-01-01T00:00:00.000000Z"]
    assert json_column(pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32())) == ["infinity", "1970-01-01"]
    nested = pa.array([[0], None, []], pa.list_(pa.int64())).cast(pa.list_(instant))
    assert json_column(nested) == [["1970-01-01T00:00:00.000000Z"], None, []]
    maps = pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32()))
    assert json_column(maps) == [{"k": 1}, None]
    structs = pa.array([{"a": 1, "b": b"\x00"}, None], pa.struct([("a", pa.int32()), ("b", pa.binary())]))
    assert json_column(structs) == [{"a": 1, "b": "AA=="}, None]
    assert json_column(pa.chunked_array([pa.array([[1, 2]]), pa.array([[3]])]).slice(1)) == [[3]]


def test_a_float_has_the_digits_that_it_was_written_with() -> None:
    floats = pa.array([1.1, 16777217.0, float("nan"), float("-inf"), None, 1e-45], pa.float32())
    assert json_column(floats) == [1.1, 16777216.0, "NaN", "-Infinity", None, 1e-45]


def test_keys_of_maps_are_the_text_of_their_json() -> None:
    key = pa.struct([("a", pa.float64())])
    maps = pa.array([[({"a": 1.5}, 1), ({"a": float("nan")}, 2)]], pa.map_(key, pa.int32()))
    assert json_column(maps) == [{'{"a": 1.5}': 1, '{"a": "NaN"}': 2}]
    assert json_column(pa.array([[(b"\xff", 1)]], pa.map_(pa.binary(), pa.int32()))) == [{"/w==": 1}]
    assert json_value({True: 1, b"\xff": 2, float("nan"): 3, 4: 5}) == {"true": 1, "/w==": 2, "NaN": 3, "4": 5}


def test_columns_of_one_name_get_numbers() -> None:
    assert unique_names(["a", "b", "a", "a"]) == ["a", "b", "a_2", "a_3"]
    assert unique_names(["a", "a", "a_2", "a_2"]) == ["a", "a_3", "a_2", "a_2_2"]


def test_progress_reads_well() -> None:
    assert [duration(None), duration(61), duration(3661)] == ["", "1:01", "1:01:01"]
    assert bar(50, width=4) == "██░░ 50.00%"
    job = {"kind": "table", "name": "o", "state": "creating", "phase": "copy", "percent": 12.345, "done": 1, "total": 8}
    line = plain_line({**job, "rows": 1000, "rows_per_s": 10.0, "eta_s": 90, "waiting_for": "a lock"})
    assert line == "table o: creating, copy 12.35% 1/8 1,000 rows, 10 rows/s, eta 1:30, waiting for a lock"


def test_json_logs_are_one_object_a_line_without_the_text_of_exceptions() -> None:
    try:
        raise ValueError("a row's value")
    except ValueError as error:
        record = logging.LogRecord("headwater", logging.ERROR, "f", 1, "it %s", ("failed",), (ValueError, error, None))
    found = json.loads(JsonFormatter().format(record))
    assert (found["level"], found["message"], found["error"]) == ("error", "it failed", "ValueError")
    assert "row's" not in json.dumps(found)


def test_status_that_is_piped_keeps_each_job_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "the backfill of a table with a long name, " * 5
    job = {"name": "j", "kind": "view", "state": "live", "phase": "live", "percent": 0.0, "rows": 0}
    job |= {"rows_per_s": 0, "eta_s": None, "waiting_for": waits}
    status = {"committed_epoch": 1, "engine": {"paused": False}, "jobs": [job], "errors": []}
    monkeypatch.setattr("headwater.cli.commands._status", lambda _: status)
    assert waits in CliRunner().invoke(app, ["status"]).stdout
