"""Fixtures shared by all test phases. Servers and the Spark session start on first use and live as long as the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headwater.testing import servers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sink_world import SinkWorld


def _server(version: str) -> Iterator[servers.PostgresServer]:
    if not servers.PostgresServer.available(version):
        pytest.skip(f"no binaries of Postgres {version} on this machine")
    with servers.PostgresServer(version) as server:
        yield server


@pytest.fixture(scope="session")
def postgres15() -> Iterator[servers.PostgresServer]:
    """Debian's Postgres 15. Tests make databases of their own in it, and must not stop it."""
    yield from _server("15")


@pytest.fixture(scope="session")
def postgres18() -> Iterator[servers.PostgresServer]:
    """The embedded Postgres 18. Tests make databases of their own in it, and must not stop it."""
    yield from _server("embedded")


@pytest.fixture(scope="session")
def postgres14() -> Iterator[servers.PostgresServer]:
    yield from _server("14")


@pytest.fixture(scope="session")
def postgres16() -> Iterator[servers.PostgresServer]:
    yield from _server("16")


@pytest.fixture(scope="session")
def postgres17() -> Iterator[servers.PostgresServer]:
    yield from _server("17")


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives a loopback port that nobody listens on, a new one at each call."""
    return servers.free_port


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A path for an engine's data directory; it does not exist yet, as for a new user."""
    return tmp_path / "headwater-data"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One local session for all tests: a start takes several seconds, a job a few tenths."""
    from pyspark.sql import SparkSession

    from headwater.spark.java import find_java

    # Without it Spark's workers take whatever python3 is first on the PATH.
    os.environ.update(find_java(), PYSPARK_PYTHON=sys.executable, PYSPARK_DRIVER_PYTHON=sys.executable)
    place = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.local.dir": str(place / "local"),
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.scheduler.mode": "FAIR",
    }
    builder = SparkSession.builder.master("local[2]").appName("headwater-tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def sink_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SinkWorld]:
    """Real targets of all sinks; each server starts when the first test needs it."""
    from sink_world import SinkWorld

    world = SinkWorld(tmp_path_factory.mktemp("sinks"))
    yield world
    world.close()
