"""Real targets for the sink tests: private servers on free ports, started once per test session and stopped by their
id.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from headwater.spark.java import find_java

POSTGRES_BIN = Path("/usr/lib/postgresql/15/bin")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _as_user(user: str, command: list[str]) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *command] if os.getuid() == 0 else command


@contextmanager
def postgres_server() -> Iterator[int]:
    """A Postgres with trust login of user `postgres` on the port that it gives."""
    root = Path(tempfile.mkdtemp(prefix="headwater-sink-pg-"))
    port = free_port()
    if os.getuid() == 0:
        shutil.chown(root, "postgres", "postgres")
    data = root / "data"
    initdb = [str(POSTGRES_BIN / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"]
    subprocess.run(_as_user("postgres", initdb), check=True, stdout=subprocess.DEVNULL, cwd=root)
    command = [str(POSTGRES_BIN / "postgres"), "-D", str(data), "-p", str(port), "-k", str(root), "-c", "fsync=off"]
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(_as_user("postgres", command), stdout=log, stderr=log, cwd=root)
    try:
        wait_for_port(port)
        _wait_for_postgres(port)
        yield port
    finally:
        server.send_signal(signal.SIGINT)  # fast shutdown: does not wait for clients
        server.wait(timeout=30)
        shutil.rmtree(root, ignore_errors=True)


def _wait_for_postgres(port: int, *, seconds: float = 30) -> None:
    """It listens before it takes connections."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            psycopg.connect(f"host=127.0.0.1 port={port} user=postgres dbname=postgres", connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def wait_for_port(port: int, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port}")


KAFKA_JARS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "kafka"


@contextmanager
def kafka_broker() -> Iterator[str]:
    """A Kafka broker in one process (KRaft); gives its bootstrap address. The jars: see docs/sinks.md."""
    root = Path(tempfile.mkdtemp(prefix="headwater-sink-kafka-"))
    port, control = free_port(), free_port()
    settings = root / "server.properties"
    settings.write_text(_KAFKA.format(port=port, control=control, root=root))
    java = [f"{find_java()['JAVA_HOME']}/bin/java", "-Xmx384m", "-XX:+UseSerialGC", "-cp", f"{KAFKA_JARS}/*"]
    arguments = ["format", "--standalone", "-t", "AAAAAAAAAAAAAAAAAAAAAA", "-c", str(settings)]
    with (root / "log").open("wb") as log:
        subprocess.run([*java, "kafka.tools.StorageTool", *arguments], check=True, stdout=log, stderr=log)
        server = subprocess.Popen([*java, "kafka.Kafka", str(settings)], stdout=log, stderr=log)
    try:
        wait_for_port(port, seconds=60)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(timeout=30)
        shutil.rmtree(root, ignore_errors=True)


_KAFKA = """
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{control}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{control}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{control}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={root}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
"""


def read_topic(bootstrap: str, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """All committed messages of a topic, per partition in order."""
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
    )
    found: list[tuple[bytes | None, bytes | None]] = []
    try:
        unread = set(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, p, 0) for p in unread])
        while unread:
            message = consumer.poll(30)
            assert message is not None, "the broker does not answer"
            if message.error() is None:
                found.append((message.key(), message.value()))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                # A partition that grew meanwhile comes to its end a second time.
                unread.discard(message.partition())
            else:
                raise AssertionError(message.error())
    finally:
        consumer.close()
    return found


MARIADB = Path("/usr/sbin/mariadbd")


@contextmanager
def mariadb_server(certificate: Path | None = None, key: Path | None = None) -> Iterator[int]:
    """A MariaDB with the user `headwater`, password from the environment variable HEADWATER_TEST_PASSWORD; with a
    certificate it offers TLS.
    """
    import pymysql

    root = Path(tempfile.mkdtemp(prefix="headwater-sink-maria-"))
    port, data, socket_path = free_port(), root / "data", root / "socket"
    user = "mysql" if os.getuid() == 0 else ""
    if user:
        shutil.chown(root, user, user)
    install = ["mariadb-install-db", f"--datadir={data}", "--auth-root-authentication-method=normal", "--skip-test-db"]
    subprocess.run(_as_user(user, install), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=root)
    command = [str(MARIADB), "--no-defaults", f"--datadir={data}", f"--port={port}", f"--socket={socket_path}"]
    command += ["--bind-address=127.0.0.1", f"--pid-file={root}/pid", "--innodb-flush-log-at-trx-commit=0"]
    if certificate is not None and key is not None:
        for name, path in (("ssl-cert", certificate), ("ssl-key", key)):
            copy = Path(shutil.copy(path, root / name))
            if user:
                shutil.chown(copy, user, user)
            command.append(f"--{name}={copy}")
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(_as_user(user, command), stdout=log, stderr=log, cwd=root)
    try:
        wait_for_port(port)
        with pymysql.connect(unix_socket=str(socket_path), user="root") as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE shop")
            cursor.execute("CREATE USER headwater@'%%' IDENTIFIED BY %s", (os.environ["HEADWATER_TEST_PASSWORD"],))
            cursor.execute("GRANT ALL ON *.* TO headwater@'%'")
        yield port
    finally:
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(root, ignore_errors=True)
