"""`headwater` on a data directory that is missing, damaged, newer or empty: what it says, and what it leaves alone."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from engine_process import headwater

pytestmark = pytest.mark.spark


def test_a_damaged_meta_store_is_named_and_exits_1(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "meta.db").write_bytes(b"this is not a database, and never was" * 300)
    done = headwater("run", data_dir=data)
    assert done.returncode == 1
    assert "error: [META_STORE_BROKEN]" in done.stderr
    assert "hint:" in done.stderr


def test_a_meta_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with sqlite3.connect(data / "meta.db") as db:
        db.execute("CREATE TABLE settings (name VARCHAR PRIMARY KEY, value TEXT)")
        db.execute("INSERT INTO settings VALUES ('schema_version', '99')")
    done = headwater("run", data_dir=data)
    assert done.returncode == 2
    assert "error: [META_STORE_NEWER]" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["pause"],
        ["drop", "t"],
        ["resync", "t"],
        ["dead-letters"],
        ["sql", "-c", "SELECT 1"],
        ["sql", "-c", "SHOW JOBS; SELEC 1"],
    ],
)
def test_a_command_on_a_directory_that_is_not_there_makes_none(tmp_path: Path, arguments: list[str]) -> None:
    done = headwater(*arguments, data_dir=tmp_path / "nosuch")
    assert done.returncode == 2 and "error: [NO_DATA_DIRECTORY]" in done.stderr
    assert not (tmp_path / "nosuch").exists()


def test_a_refused_option_of_run_makes_no_directory(tmp_path: Path) -> None:
    done = headwater("run", "--master", "nosuch", data_dir=tmp_path / "nosuch")
    assert done.returncode == 2 and "error: [OPTION_VALUE] nosuch is not a master" in done.stderr
    assert not (tmp_path / "nosuch").exists()


def test_status_of_nothing_says_how_to_begin(tmp_path: Path) -> None:
    done = headwater("status", data_dir=tmp_path / "none")
    assert done.returncode == 2
    assert "error: [NO_DATA_DIRECTORY]" in done.stderr
    assert not (tmp_path / "none").exists()


def test_the_log_as_json_is_json_and_holds_no_token(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.sql"
    file.write_text("CREATE TABLE t (id INT PRIMARY KEY)")
    done = headwater("--log-json", "run", str(file), "--until-caught-up", data_dir=tmp_path / "data")
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stderr.splitlines() if not line.startswith("WARNING: ")]  # the JVM's own
    messages = [line["message"] for line in lines]
    assert any(m.startswith("headwater runs on ") for m in messages) and "table t: live" in messages
    assert "token" not in done.stderr
