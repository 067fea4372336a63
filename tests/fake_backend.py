"""A backend for tests of the HTTP endpoint and the page: a shop pipeline that moves with time, without an engine."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import UTC, datetime
from typing import Any

from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError
from headwater.model.trust import Trust
from headwater.server.http import SqlResult
from headwater.server.metrics import Metrics

FIRST_EPOCH = 11_637_000_003_026_944


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _job(number: int, name: str, kind: str, state: str, depends_on: list[str], **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("done", "total", "percent", "bytes", "eta_s", "waiting_for")) | {"rows": 0}
    definition = more.pop("definition", f"CREATE {kind.upper()} {name} …")
    common = {"id": number, "job_id": number, "name": name, "kind": kind, "state": state, "depends_on": depends_on}
    return common | {"lane": "main", "definition": definition, "phase": state, "rows_per_s": 0.0} | empty | more


class FakeBackend:
    """Answers like an engine with one source, four tables, three views and two sinks."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.trusts: list[Trust] = []
        self.cancelled: list[str] = []
        self.errors: list[dict[str, Any]] | None = None  # None: two that are open
        self.all_live = False
        self.paused = False
        self.is_healthy = True
        self.empty = False
        self.started = time.time() - 754
        self.counts = Metrics()
        self.counts.committed(FIRST_EPOCH)

    def problem(self) -> str | None:
        return None if self.is_healthy else "no epoch was completed for 47 s"

    def ended_by(self) -> HeadwaterError | None:
        return None

    def metrics(self) -> bytes:
        return self.counts.render()

    async def sql(self, statement: str, trust: Trust = Trust.ADMIN) -> SqlResult:
        self.statements.append(statement)
        self.trusts.append(trust)
        match statement.strip(" ;").upper():
            case "PAUSE" | "RESUME" as word:
                self.paused = word == "PAUSE"
                return SqlResult([], [])
            case "FOREVER":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled.append(statement)
                    raise
            case "BUG":
                raise ValueError("secret row value")
            case "GONE":
                raise DefiniteError("TABLE_GONE", "the table was dropped at the source")
            case "BUSY":
                raise TransientError("SOURCE_BUSY", "the source does not answer")
            case word if "NOSUCH" in word:
                raise UsageError("UNKNOWN_TABLE", "there is no table 'nosuch'", hint="SHOW JOBS lists what there is")
        rows: list[dict[str, Any]] = [
            {"country": "DE", "total": "1834022.50", "orders": 9007199254740993, "tags": ["a", "b"]},
            {"country": "<b>FR</b>", "total": None, "orders": 61_204, "tags": []},
        ]
        return SqlResult(["country", "total", "orders", "tags"], rows, FIRST_EPOCH)

    def status(self) -> dict[str, Any]:
        now = time.time()
        step = now - self.started
        jobs = [] if self.empty else self._jobs(step)
        jobs = [{**job, "state": "live"} for job in jobs] if self.all_live else jobs
        names = ("name", "phase", "done", "total", "percent", "rows", "bytes", "rows_per_s", "eta_s", "waiting_for")
        return {
            "engine": {
                "version": "0.1.0",
                "pid": 48213,
                "generation": 7,
                "started_at": _iso(self.started),
                "master": "local[*]",
                "paused": self.paused,
                "data_dir": "/var/lib/headwater/shop",
            },
            "committed_epoch": None if self.empty else FIRST_EPOCH + (int(step) << 16) * 1000,
            "barriers": [] if self.empty else self._barriers(now),
            "jobs": jobs,
            "progress": [{"job_id": job["id"]} | {name: job[name] for name in names} for job in jobs],
            "sources": [] if self.empty else [self._source(step)],
            "log_stores": [] if self.empty else self._log_stores(),
            "errors": self.errors if self.errors is not None else [] if self.empty else self._errors(now),
        }

    def _barriers(self, now: float) -> list[dict[str, Any]]:
        first = int(now) - 120
        return [
            {
                "epoch": FIRST_EPOCH + (second << 16) * 1000,
                "ms": 180 + 90 * math.sin(second / 7) + (1300 if second % 53 == 0 else (second * 37) % 60),
                "at": _iso(second),
            }
            for second in range(first, first + 120)
        ]

    def _jobs(self, step: float) -> list[dict[str, Any]]:
        moving = 0.0 if self.paused else 1.0
        wave = moving * (1 + 0.3 * math.sin(step / 3))
        copied = min(9_990_000, 5_200_000 + int(step % 60) * 61_000)
        revenue = (
            "CREATE MATERIALIZED VIEW revenue AS\nSELECT country, sum(amount) AS total\nFROM orders JOIN customers"
        )
        return [
            _job(1, "shop", "source", "live", [], rows_per_s=2410 * wave, phase="streaming"),
            _job(
                2,
                "customers",
                "table",
                "live",
                ["shop"],
                rows=812_440,
                bytes=96_000_000,
                rows_per_s=310 * wave,
                phase="streaming",
            ),
            _job(
                3,
                "orders",
                "table",
                "creating",
                ["shop"],
                phase="backfill",
                done=int(copied / 100_000),
                total=100,
                percent=copied / 100_000,
                rows=copied,
                bytes=copied * 147,
                rows_per_s=61_250 * wave,
                eta_s=75.0,
            ),
            _job(4, "products", "table", "live", ["shop"], rows=12_000, bytes=1_900_000, phase="streaming"),
            _job(5, "exchange_rates_by_currency_and_day", "table", "live", [], rows=4_380, bytes=210_000, phase="live"),
            _job(
                6,
                "revenue",
                "view",
                "creating",
                ["orders", "customers", "exchange_rates_by_currency_and_day"],
                lane="6",
                phase="consuming log store",
                definition=revenue,
                done=41,
                total=256,
                percent=16.02,
                rows=88,
                rows_per_s=40 * wave,
                eta_s=611,
                waiting_for="the backfill of orders",
            ),
            _job(7, "active_customers", "view", "live", ["customers"], rows=51_220, rows_per_s=55 * wave, phase="live"),
            _job(8, "stock", "view", "failed", ["products"], phase="stopped", rows=11_100),
            _job(9, "revenue_out", "sink", "paused", ["revenue"], phase="paused", rows=0),
            _job(
                10,
                "customers_lake",
                "sink",
                "live",
                ["active_customers"],
                rows=918_211,
                rows_per_s=54 * wave,
                phase="delivering",
            ),
        ]

    def _source(self, step: float) -> dict[str, Any]:
        return {
            "name": "shop",
            "connector": "postgres-cdc",
            "position": f"2A/{int(step) * 4096:X}",
            "acknowledged": f"2A/{int(step - 2) * 4096:X}",
            "lag_bytes": 18_432,
            "lag_s": 0.4,
            "retained_bytes": 83_886_080,
        }

    def _log_stores(self) -> list[dict[str, Any]]:
        done = FIRST_EPOCH + (90 << 16)
        return [
            {
                "sink": "revenue_out",
                "backlog_rows": 0,
                "backlog_bytes": 0,
                "backlog_epochs": 0,
                "truncated_to": None,
                "delivered_to": None,
            },
            {
                "sink": "customers_lake",
                "backlog_rows": 1_204,
                "backlog_bytes": 181_000,
                "backlog_epochs": 2,
                "truncated_to": done,
                "delivered_to": done,
            },
        ]

    def _errors(self, now: float) -> list[dict[str, Any]]:
        return [
            {
                "at": _iso(self.started + 600),
                "job_id": 8,
                "name": "stock",
                "code": "COLUMN_DROPPED",
                "retrying": False,
                "message": "column 'shelf' of table products, which the view reads, is gone",
                "hint": "DROP MATERIALIZED VIEW stock; and create it again without this column",
            },
            {
                "at": _iso(self.started + 700),
                "job_id": 10,
                "name": "customers_lake",
                "code": "SINK_UNREACHABLE",
                "retrying": True,
                "message": "the target did not answer within 10 s",
                "hint": "check that the server runs; delivery goes on by itself",
            },
        ]
