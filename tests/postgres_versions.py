"""Which Postgres a test runs on.

Debian's 15 and the embedded 18 are what `make test` has anyway. 14, 16 and 17 are there where scripts/bootstrap.sh
could fetch them: what is quick runs on them too, the rest is slow. HW_TEST_POSTGRES=17 lets the tests that use one
server with one engine run on another version than 15.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

USUAL = os.environ.get("HW_TEST_POSTGRES", "15")
OTHERS = ["14", "16", "17"]
# For `PostgresServer`, and the same as the names of fixtures of conftest.py.
VERSIONS = ["15", "embedded", *(pytest.param(v, marks=pytest.mark.slow) for v in OTHERS)]
NEWEST = ["embedded", *(pytest.param(v, marks=pytest.mark.slow) for v in ("15", *OTHERS))]
SERVERS = ["postgres15", "postgres18", *(pytest.param(f"postgres{v}", marks=pytest.mark.slow) for v in OTHERS)]
EVERY_SERVER = ["postgres15", "postgres18", *(f"postgres{v}" for v in OTHERS)]


def odd_collation(connection: Any) -> str:
    """A collation whose order is not ours; the embedded server is built without ICU."""
    found = connection.execute("SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'").fetchone()
    return "und-x-icu" if found else "C.utf8"
