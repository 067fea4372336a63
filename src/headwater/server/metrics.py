"""The Prometheus metrics of an engine: their names are part of the contract, so they live in one place.

The engine and its actors call the methods; `http.py` serves what `render` gives. A registry of its own keeps apart two
engines in one process, and the metrics of a program that embeds us.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
# From an idle epoch (a few ms) to one that is plainly in trouble; a Spark job alone costs 0.1 to 0.3 s.
BARRIER_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What happened since this engine started (counters) and how things stand (gauges)."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        buckets = BARRIER_BUCKETS_S
        self._epoch = Gauge("headwater_committed_epoch", "The newest committed epoch", registry=own)
        about = "From the injection of a barrier to its commit"
        self._barrier = Histogram("headwater_barrier_seconds", about, buckets=buckets, registry=own)
        about = "Spark jobs run, by stage"
        self._spark_jobs = Counter("headwater_spark_jobs_total", about, ["stage"], registry=own)
        about = "Rows that a job has committed or delivered"
        self._rows = Counter("headwater_rows_total", about, ["job"], registry=own)
        about = "Log of the source that is not captured yet"
        self._lag = Gauge("headwater_source_lag_bytes", about, ["source"], registry=own)
        about = "Rows that the sink has not delivered yet"
        self._backlog = Gauge("headwater_log_store_backlog_rows", about, ["sink"], registry=own)
        about = "Errors that a user may see, by code"
        self._errors = Counter("headwater_errors_total", about, ["code"], registry=own)

    def committed(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def barrier(self, seconds: float) -> None:
        self._barrier.observe(seconds)

    def spark_job(self, stage: str, count: int = 1) -> None:
        self._spark_jobs.labels(stage).inc(count)

    def rows(self, job: str, count: int) -> None:
        self._rows.labels(job).inc(count)

    def source_lag(self, source: str, lag_bytes: int) -> None:
        self._lag.labels(source).set(lag_bytes)

    def log_store_backlog(self, sink: str, rows: int) -> None:
        self._backlog.labels(sink).set(rows)

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def forget(self, job: str) -> None:
        """Takes a dropped job's series out, whatever its kind was."""
        for metric in (self._rows, self._lag, self._backlog):
            with contextlib.suppress(KeyError):
                metric.remove(job)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(_WithoutCreated(self._registry))


class _WithoutCreated(Collector):
    """Leaves out the `_created` series that the client adds to every counter: they are not part of the contract."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if family.type == "gauge" and family.name.endswith("_created"):
                continue
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
