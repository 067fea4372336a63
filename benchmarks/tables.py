"""The tables whose first copy is measured: one with a plain key, the same with random uuids, and TPC-H's lineitem,
which we did not choose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATOR = "tpchgen-cli"
GENERATOR_VERSION = "4.0.0"
LINEITEMS = 6_001_215  # of scale factor 1

WIDE = """CREATE TABLE wide (id bigint PRIMARY KEY, a int, b int, c bigint, d double precision, e numeric(12, 2),
                             f text, g text, h timestamptz, i boolean)"""
STREWN = WIDE.replace("TABLE wide (id bigint", "TABLE strewn (id uuid")
FILL_WIDE = """INSERT INTO wide
    SELECT n, n % 1000, n % 77, n * 3, n * 1.5, (n % 10000) / 100.0, 'customer ' || n, md5(n::text),
           timestamptz '2026-01-01' + n * interval '1 second', n % 2 = 0
      FROM generate_series({low}::bigint, {high}::bigint) n"""
LINEITEM = """CREATE TABLE lineitem (l_orderkey bigint, l_partkey bigint NOT NULL, l_suppkey bigint NOT NULL,
    l_linenumber int, l_quantity decimal(15, 2) NOT NULL, l_extendedprice decimal(15, 2) NOT NULL,
    l_discount decimal(15, 2) NOT NULL, l_tax decimal(15, 2) NOT NULL, l_returnflag char(1) NOT NULL,
    l_linestatus char(1) NOT NULL, l_shipdate date NOT NULL, l_commitdate date NOT NULL, l_receiptdate date NOT NULL,
    l_shipinstruct char(25) NOT NULL, l_shipmode char(10) NOT NULL, l_comment varchar(44) NOT NULL,
    PRIMARY KEY (l_orderkey, l_linenumber))"""


@dataclass(frozen=True)
class Table:
    name: str
    key: str
    """The first column of the key, or one by which others cut it."""
    ddl: str
    fill: Callable[[Any, int], None]
    """Give it about that many rows, through a connection."""


def _fill_wide(db: Any, rows: int) -> None:
    db.execute(FILL_WIDE.format(low=1, high=rows).encode())


def _fill_strewn(db: Any, rows: int) -> None:
    fill = FILL_WIDE.replace("INTO wide", "INTO strewn").replace("SELECT n,", "SELECT gen_random_uuid(),")
    db.execute(fill.format(low=1, high=rows).encode())


def _fill_lineitem(db: Any, rows: int) -> None:
    """By the TPC-H generator from PyPI, in an environment of its own."""
    place = Path.home() / ".cache/headwater/tpch"
    program = place / "bin" / GENERATOR
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True)
        wanted = f"{GENERATOR}=={GENERATOR_VERSION}"
        subprocess.run([place / "bin/python", "-m", "pip", "-q", "install", wanted], check=True, capture_output=True)
    made = [program, "csv", "-s", f"{rows / LINEITEMS:.4f}", "--tables=lineitem", "--stdout"]
    with (
        subprocess.Popen(made, stdout=subprocess.PIPE) as running,
        db.cursor().copy(b"COPY lineitem FROM STDIN (FORMAT csv, HEADER)") as copy,
    ):
        assert running.stdout is not None
        while block := running.stdout.read(1 << 20):
            copy.write(block)
    assert running.returncode == 0


wide = Table("wide", "id", WIDE, _fill_wide)
strewn = Table("strewn", "a", STREWN, _fill_strewn)
lineitem = Table("lineitem", "l_orderkey", LINEITEM, _fill_lineitem)
