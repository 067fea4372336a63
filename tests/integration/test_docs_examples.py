"""Every example of the documentation is run: each page is read from top to bottom by `docs_reader.Reader`.

One engine, one Postgres and one data directory serve all pages; a page begins with the shop of the README (`SHOP`), and
at its end everything that it made must be live, delivered and without an error. Kafka and MariaDB take part where they
are installed. A block that cannot be run here says so in the page, and `NOT_RUN` lists how many each page has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from docs_reader import KINDS, Block, Reader, blocks
from headwater.spark.java import find_java
from headwater.testing.servers import PostgresServer
from sink_targets import KAFKA_JARS, MARIADB
from sink_world import SinkWorld

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
ROOT = Path(__file__).parents[2]
PAGES = {p.name: p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
NOT_RUN = {"README.md": 2, "operating.md": 3, "spark.md": 5}
# More than half of the time: they start engines, brokers and sessions of their own.
LONG = {"operating.md", "sinks.md", "spark.md", "tutorial.md"}
WITH_SHOP = {"concepts.md", "views.md", "sinks.md", "spark.md"}
SECRETS = ("PGPASSWORD", "DWH_PASSWORD", "META_PASSWORD")
SOURCE = (
    "CREATE TABLE customers (id bigint PRIMARY KEY, name text NOT NULL, country text NOT NULL)",
    "CREATE TABLE orders (id bigint PRIMARY KEY, customer_id bigint NOT NULL, amount numeric(10,2) NOT NULL)",
    "INSERT INTO customers VALUES (1, 'Ada', 'GB'), (2, 'Emmy', 'DE'), (3, 'Sofia', 'DE')",
    "INSERT INTO orders VALUES (10, 1, 25.00), (11, 2, 40.50), (12, 3, 9.99)",
)


def shop() -> str:
    """The pipeline of the README, which the other pages take for granted."""
    found: Block = next(b for b in blocks(PAGES["README.md"]) if b.kind == "sql")
    return found.text


def with_certificate(server: PostgresServer, folder: Path) -> Path | None:
    """TLS for the server; the certificate, or None where it cannot have any."""
    openssl = shutil.which("openssl")
    if openssl is None or server.version == "embedded":
        return None
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    files = ["-addext", f"subjectAltName=IP:{server.host}", "-keyout", server.data / "server.key"]
    subprocess.run([*make, *files, "-out", server.data / "server.crt"], check=True, capture_output=True)
    owner = server.data.stat()
    for name in ("server.key", "server.crt"):
        os.chown(server.data / name, owner.st_uid, owner.st_gid)
        os.chmod(server.data / name, 0o600)
    server.restart(settings={"ssl": "on"})
    return Path(shutil.copy(server.data / "server.crt", folder / "ca.crt"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, sink_world: SinkWorld) -> Iterator[Reader]:
    place = tmp_path_factory.mktemp("reader")
    with (
        PostgresServer("15" if PostgresServer.available("15") else "embedded") as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        server.execute(f"CREATE ROLE app SUPERUSER LOGIN PASSWORD '{server.password}'")
        for database in ("shop", "dwh", "headwater"):
            server.create_database(database)
        for name in SECRETS:
            patch.setenv(name, server.password)
        patch.setenv("MYSQL_PASSWORD", os.environ["HEADWATER_TEST_PASSWORD"])
        for name, value in find_java().items():
            patch.setenv(name, value)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.delenv("HEADWATER_DATA_DIR", raising=False)
        patch.chdir(place)
        certificate = with_certificate(server, place)
        found = Reader(place, server, {"tls": str(certificate)} if certificate else {})
        yield found
        found.stop()


@pytest.fixture
def prepared(reader: Reader, name: str, sink_world: SinkWorld) -> Iterator[Reader]:
    """What the page takes for granted is there; afterwards nothing is left of it."""
    reader.names, reader.output = {}, ""
    for database in ("shop", "dwh"):  # a sink's progress stays in its target, for whoever comes next
        reader.server.execute("DROP SCHEMA public CASCADE", "CREATE SCHEMA public", database=database)
    pipeline = reader.place / "pipeline.sql"
    if name == "tutorial.md":  # begins with nothing
        pipeline.unlink(missing_ok=True)
    else:
        reader.server.execute(*SOURCE, database="shop")
        pipeline.write_text(reader.adapted(shop()))
    if name in WITH_SHOP:
        reader.headwater("sql", str(pipeline))
        reader.headwater("sql", "-c", "WAIT; FLUSH")
    if name == "sinks.md":
        if MARIADB.exists():
            reader.addresses["mysql"] = str(sink_world.mariadb_port)
        if list(KAFKA_JARS.glob("kafka_2.13-*.jar")):
            reader.addresses["kafka"] = sink_world.bootstrap
    if name == "views.md":
        lake_table(reader.place / "lake" / "orders")
    yield reader
    if "HEADWATER_DATA_DIR" in reader.exported:  # a page with a data directory of its own
        reader.stop()
        reader.server.execute(
            "SELECT pg_drop_replication_slot('headwater')", "DROP PUBLICATION headwater", database="shop"
        )
    else:
        reader.empty()
    with reader.server.connect("shop") as connection:  # what Headwater made at the source goes with the source
        assert connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == []
        assert connection.execute("SELECT pubname FROM pg_publication").fetchall() == []
    if "spark" in reader.names:
        reader.names["spark"].stop()
    for variable in reader.exported:
        if variable not in SECRETS:
            del os.environ[variable]
    reader.exported = {}


def lake_table(path: Path) -> None:
    """A Delta table with change data feed."""
    import pyarrow as pa
    from deltalake import write_deltalake

    rows = pa.table(
        {"id": pa.array([1, 2]), "amount": pa.array([Decimal("1.50"), Decimal("2.00")], pa.decimal128(12, 2))}
    )
    write_deltalake(str(path), rows, configuration={"delta.enableChangeDataFeed": "true"})


def pages() -> list[Any]:
    with_examples = [n for n in PAGES if any(b.kind != "text" for b in blocks(PAGES[n]))]
    return [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in with_examples]


@pytest.mark.parametrize("name", pages())
def test_page_does_what_it_says(prepared: Reader, name: str) -> None:
    prepared.read(PAGES[name])
    prepared.settle()


def test_every_block_is_run_or_says_why_not() -> None:
    every = [b for page in PAGES.values() for b in blocks(page)]
    assert [str(b) for b in every if b.kind not in KINDS] == []
    assert Counter(b.page for b in every if b.not_run) == NOT_RUN
