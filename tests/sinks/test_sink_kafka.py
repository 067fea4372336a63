"""What the Kafka sink puts into topics: formats, keys, tombstones, schemas, messages that are too large."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pytest

from headwater.connectors.kafka import avro
from headwater.errors import DefiniteError
from headwater.model.schema import Column
from headwater.sink.delivery import DeliveryLoop
from sink_targets import read_topic
from sink_world import SinkWorld, Target

pytestmark = [pytest.mark.spark, pytest.mark.kafka]
COLUMNS = (Column("k", "STRING", nullable=False), Column("v", "INT"))
DDL = "k STRING, v INT, _op TINYINT"
ROWS = [("a", 1, 1), ("b", None, 2)]


def deliver(target: Target, spark: Any, rows: list[Any], epoch: int = 10, **options: str) -> Any:
    target.options.update(options)
    sink = target.open(1, columns=COLUMNS, key=("k",))
    sink.validate(COLUMNS, ("k",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    return loop.deliver(epoch - 1, epoch, lambda: spark.createDataFrame(rows, DDL))


def test_debezium_messages_have_an_envelope_and_deletes_a_tombstone(spark: Any, sink_world: SinkWorld) -> None:
    target = sink_world.target("kafka")
    deliver(target, spark, ROWS, format="debezium")
    messages = sorted(read_topic(sink_world.bootstrap, target.name), key=lambda m: (m[0] or b"", m[1] is None))
    assert [json.loads(k or b"") for k, _ in messages] == [{"k": "a"}, {"k": "b"}, {"k": "b"}]
    bodies = [v and json.loads(v) for _, v in messages]
    assert [b and (b["before"], b["after"], b["op"]) for b in bodies] == [
        (None, {"k": "a", "v": 1}, "u"),
        ({"k": "b"}, None, "d"),
        None,
    ]
    assert bodies[0]["source"]["connector"] == "headwater" and bodies[0]["ts_ms"] > 0


def test_a_tombstone_follows_its_delete(spark: Any, sink_world: SinkWorld) -> None:
    target = sink_world.target("kafka")
    target.options["topic.partitions"] = "1"
    deliver(target, spark, [(f"k{i}", None, 2) for i in range(50)], format="debezium")
    messages = read_topic(sink_world.bootstrap, target.name)
    last: dict[bytes | None, bytes | None] = dict(messages)
    assert len(messages) == 100 and len(last) == 50
    assert set(last.values()) == {None}


def test_avro_without_a_registry_is_single_object_encoding_with_the_schema_beside_the_progress(
    spark: Any, sink_world: SinkWorld
) -> None:
    target = sink_world.target("kafka")
    deliver(target, spark, ROWS, format="avro")
    records = read_topic(sink_world.bootstrap, "headwater_progress")
    schemas = {
        json.loads(k)[2]: json.loads(v or b"") for k, v in records if k and k.startswith(b"[") and b"schema" in k
    }

    def read(message: bytes) -> Any:
        schema = fastavro.parse_schema(schemas[message[2:10].hex()])
        return fastavro.schemaless_reader(io.BytesIO(message[10:]), schema, None)

    found = {read(k or b"")["k"]: v and read(v) for k, v in read_topic(sink_world.bootstrap, target.name)}
    assert found == {"a": {"k": "a", "v": 1}, "b": None}


@contextmanager
def registry() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """The registry's one call that a producer makes. (A real registry is not to be had from the package registries.)"""
    subjects: dict[str, list[str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            subject = self.path.split("/")[2]
            schema = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["schema"]
            fastavro.parse_schema(json.loads(schema))
            subjects.setdefault(subject, []).append(schema)
            self.send_response(409 if subject.startswith("taken") else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"id": 7 if subject.endswith("-value") else 6}).encode())

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", subjects
    finally:
        server.shutdown()


def test_avro_with_a_registry_is_in_the_registrys_wire_format(spark: Any, sink_world: SinkWorld) -> None:
    target = sink_world.target("kafka")
    with registry() as (url, subjects):
        deliver(target, spark, ROWS, **{"format": "avro", "schema.registry.url": url})
        schema = fastavro.parse_schema(json.loads(subjects[f"{target.name}-value"][0]))
        target.options["topic"] = "taken"
        with pytest.raises(DefiniteError, match="SINK_TARGET_MISMATCH"):
            deliver(target, spark, ROWS)
    [value] = [v for _, v in read_topic(sink_world.bootstrap, target.name) if v is not None]
    assert value[:5] == avro.confluent_prefix(7)
    assert fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None) == {"k": "a", "v": 1}


def test_a_message_that_is_too_large_is_refused_or_becomes_a_dead_letter(
    spark: Any, sink_world: SinkWorld, tmp_path: Path
) -> None:
    target = sink_world.target("kafka")
    rows = [("x" * 2_000_000, 1, 1), ("small", 2, 1)]
    with pytest.raises(DefiniteError, match="SINK_ROW_REFUSED"):
        deliver(target, spark, rows)
    assert read_topic(sink_world.bootstrap, target.name) == []
    delivered = deliver(target, spark, rows, **{"dead_letters.path": str(tmp_path)})
    assert (delivered.rows, delivered.refused, len(delivered.dead_letters)) == (1, 1, 1)
    assert len(read_topic(sink_world.bootstrap, target.name)) == 1


def test_a_batch_larger_than_the_clients_queue_arrives_whole(spark: Any, sink_world: SinkWorld) -> None:
    target = sink_world.target("kafka")
    target.options["properties.queue.buffering.max.messages"] = "1000"
    sink = target.open(1, columns=COLUMNS, key=("k",))
    sink.validate(COLUMNS, ("k",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    rows = spark.range(30_000).selectExpr(
        "CAST(id AS STRING) AS k", "CAST(id AS INT) AS v", "CAST(1 AS TINYINT) AS _op"
    )
    assert loop.deliver(0, 10, lambda: rows).rows == 30_000  # from 0: by several producers
    found = [json.loads(v or b"")["v"] for _, v in read_topic(sink_world.bootstrap, target.name)]
    assert sorted(found) == list(range(30_000))


def test_a_topic_that_was_deleted_is_not_made_anew(spark: Any, sink_world: SinkWorld) -> None:
    from confluent_kafka.admin import AdminClient

    target = sink_world.target("kafka")
    deliver(target, spark, ROWS)
    admin = AdminClient({"bootstrap.servers": sink_world.bootstrap})
    admin.delete_topics([target.options["topic"]])[target.options["topic"]].result()
    target.options["create_topic_if_not_exists"] = "false"  # as the engine does once something was delivered
    with pytest.raises(DefiniteError, match="SINK_TARGET_MISSING"):
        deliver(target, spark, ROWS, 11)
    assert target.options["topic"] not in admin.list_topics(timeout=30).topics
