"""The metrics' names are a contract with dashboards and alerts."""

from __future__ import annotations

from headwater.server.metrics import BARRIER_BUCKETS_S, Metrics


def _filled() -> Metrics:
    metrics = Metrics()
    metrics.committed(11_637_000_003_026_944)
    metrics.barrier(0.2)
    metrics.spark_job("table", 3)
    metrics.rows("orders", 10)
    metrics.rows("orders", 5)
    metrics.source_lag("shop", 4096)
    metrics.log_store_backlog("out", 7)
    metrics.error("SOURCE_SLOT_LOST")
    return metrics


def _series(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_exactly_the_promised_families_are_served() -> None:
    types = [line.split()[2:] for line in _filled().render().decode().splitlines() if line.startswith("# TYPE")]
    assert sorted(types) == [
        ["headwater_barrier_seconds", "histogram"],
        ["headwater_committed_epoch", "gauge"],
        ["headwater_errors_total", "counter"],
        ["headwater_log_store_backlog_rows", "gauge"],
        ["headwater_rows_total", "counter"],
        ["headwater_source_lag_bytes", "gauge"],
        ["headwater_spark_jobs_total", "counter"],
    ]
    assert not any("_created" in name for name in _series(_filled()))


def test_values_arrive_under_their_labels() -> None:
    series = _series(_filled())
    assert series["headwater_committed_epoch"] == 11_637_000_003_026_944
    assert series['headwater_spark_jobs_total{stage="table"}'] == 3
    assert series['headwater_rows_total{job="orders"}'] == 15
    assert series['headwater_source_lag_bytes{source="shop"}'] == 4096
    assert series['headwater_log_store_backlog_rows{sink="out"}'] == 7
    assert series['headwater_errors_total{code="SOURCE_SLOT_LOST"}'] == 1
    assert series['headwater_barrier_seconds_bucket{le="0.1"}'] == 0
    assert series['headwater_barrier_seconds_bucket{le="0.25"}'] == 1
    assert series["headwater_barrier_seconds_count"] == 1


def test_buckets_go_from_a_millisecond_to_a_minute() -> None:
    assert BARRIER_BUCKETS_S[0] == 0.001
    assert BARRIER_BUCKETS_S[-1] == 60


def test_dropped_job_leaves_no_series() -> None:
    metrics = _filled()
    for name in ("orders", "shop", "out", "never existed"):
        metrics.forget(name)
    assert not any(label in name for name in _series(metrics) for label in ("orders", "shop", "out"))


def test_two_engines_in_one_process_do_not_mix() -> None:
    first, second = Metrics(), Metrics()
    first.committed(1)
    second.committed(2)
    assert _series(first)["headwater_committed_epoch"] == 1
