"""What a Postgres newer than Debian's 15 does otherwise, and what it must do alike: the embedded one, one engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_world import open_world

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.slow
def test_a_newer_server_streams_stored_generated_columns_and_tables_without_a_key(tmp_path: Path) -> None:
    with open_world(tmp_path / "data", "embedded") as newer:
        newer.sql("CREATE TABLE gen (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)")
        newer.sql("CREATE TABLE bag (a int, b text); ALTER TABLE bag REPLICA IDENTITY FULL")
        newer.sql("INSERT INTO gen (id) VALUES (1), (2); INSERT INTO bag SELECT 1, 'x' FROM generate_series(1, 5)")
        newer.capture("public.gen", "gen")
        newer.capture("public.bag", "bag")
        newer.live("gen", "bag")
        newer.sql("UPDATE gen SET id = 7 WHERE id = 1; INSERT INTO gen (id) VALUES (9)")
        newer.sql("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)")
        newer.sql("INSERT INTO bag VALUES (1, 'x'), (2, NULL)")
        newer.sql("ALTER TABLE bag ADD c int DEFAULT 3; UPDATE bag SET a = 5 WHERE a = 2")
        newer.until(lambda: newer.rows("bag") == newer.source_rows("bag"))
        newer.assert_equal("gen", "gen")
        assert (9, 18) in newer.rows("gen")
