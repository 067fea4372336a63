"""Transactions of the Kafka sink and the records that tell how far it is; used by the engine and by Spark tasks.

    progress topic (compacted, one partition)
    key                     value
    sink                    {"epoch": e, "generation": g}                  what is delivered, and who owns the sink
    ["sink", "intent"]      {"id", "from", "to", "producers", "by", …}     a batch that several producers are sending,
                            or none                                        in slices "by" vnode or key
    ["sink", "3"]           {"intent": id}                                 producer 3 has sent its slice of that batch
    ["sink", "schema", n]   an Avro schema, n its fingerprint              for readers without a registry

Every record is written in the transaction whose truth it tells. `Transaction` begins with `init_transactions` on its
transactional id, which ends what an earlier producer of that id had open and makes that producer useless, and reads the
records only then: nothing of an earlier attempt can land after what it has read.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from headwater.connectors.kafka.encode import read_messages
from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError, UsageError
from headwater.sink.options import SinkOptions
from headwater.sink.sink import Progress, fenced

REQUEST_TIMEOUT_S: Final = 30.0
# A batch may take long to send. A successor does not wait for it: its `init_transactions` ends the transaction at once.
TRANSACTION_TIMEOUT_MS: Final = 600_000
COMMIT_TRIES: Final = 3
MESSAGES_PER_CALL: Final = 5_000  # a fraction of the client's queue (100,000), so that a full queue drains meanwhile
INTENT: Final = "intent"

FENCED: Final = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_TXN_STATE}
)
_REFUSED: Final = frozenset(
    {
        *(KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.TOPIC_AUTHORIZATION_FAILED),
        *(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED),
    }
)


@dataclass(frozen=True, slots=True)
class Records:
    """The committed records of one sink."""

    progress: Progress | None
    intent: Mapping[str, Any] | None
    slices: Mapping[str, str]  # producer number -> id of the intent whose slice it has sent

    @property
    def unfinished(self) -> bool:
        """Whether a batch is under way of which some producers may have sent their slice and some not."""
        return self._ahead and not self._all_sent

    @property
    def reached(self) -> Progress | None:
        """How far the target is: a batch whose slices are all there counts, also if nobody has noted it yet."""
        if self.progress is None or self.intent is None or not (self._ahead and self._all_sent):
            return self.progress
        return Progress(int(self.intent["to"]), self.progress.generation)

    @property
    def _ahead(self) -> bool:
        """Whether the intent is of a batch after what is noted; an older one is history."""
        noted = self.progress.epoch if self.progress is not None else None
        return self.intent is not None and (noted is None or int(self.intent["to"]) > noted)

    @property
    def sent(self) -> frozenset[int]:
        """The slices of the intent that are in the topic, from 0 on."""
        assert self.intent is not None
        numbers = range(int(self.intent["producers"]))
        return frozenset(n for n in numbers if self.slices.get(str(n + 1)) == self.intent["id"])

    @property
    def _all_sent(self) -> bool:
        return self.intent is not None and len(self.sent) == int(self.intent["producers"])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sink's messages and records go. Picklable: a task resolves secrets for itself."""

    options: SinkOptions
    sink: str
    generation: int

    @property
    def topic(self) -> str:
        return self.options.text("topic")

    @property
    def progress_topic(self) -> str:
        return self.options.text("progress.topic")

    def key(self, *parts: str) -> bytes:
        # A name that begins like our lists would be taken for one.
        listed = parts or self.sink.startswith("[")
        return json.dumps([self.sink, *parts]).encode() if listed else self.sink.encode()

    def client_properties(self) -> dict[str, Any]:
        given = self.options.reveal_properties()
        servers = given.pop("bootstrap.server", None) or given.pop("bootstrap.servers", None)
        if not servers:
            raise UsageError("SINK_OPTION_MISSING", "option properties.bootstrap.server is missing")
        return {"bootstrap.servers": servers, **given}

    def read(self) -> Records:
        """The last committed records. Reading ends at the last stable offset, where nothing is open any more."""
        properties = {
            **self.client_properties(),
            "group.id": f"headwater.{self.sink}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,  # at the end of the topic an answer is wanted, not the next record
        }
        found: dict[bytes, Any] = {}
        consumer = Consumer(properties, logger=silent())
        try:
            # By number: looking up "the beginning" costs the client half a second, and 0 is it, or is reset to it.
            consumer.assign([TopicPartition(self.progress_topic, 0, 0)])
            while (message := self._next(consumer)) is not None:
                found[message.key()] = message.value()
        finally:
            consumer.close()
        main, intent = (_read(found.get(key)) for key in (self.key(), self.key(INTENT)))
        slices = {}
        for key, value in found.items():
            parts = _listed(key)
            if len(parts) == 2 and parts[0] == self.sink and parts[1] != INTENT and value is not None:
                slices[parts[1]] = json.loads(value)["intent"]
        progress = Progress(main["epoch"], main["generation"]) if main is not None else None
        return Records(progress, intent, slices)

    def _next(self, consumer: Any) -> Any:
        message = consumer.poll(REQUEST_TIMEOUT_S)
        if message is None:
            raise TransientError("SINK_UNREACHABLE", f"the progress topic of sink {self.sink} does not answer")
        if message.error() is None:
            return message
        if message.error().code() == KafkaError._PARTITION_EOF:
            return None
        raise KafkaException(message.error())

    def owned(self) -> Records:
        """The records, if no newer engine owns the sink."""
        with self.translated():
            records = self.read()
        if records.progress is not None and records.progress.generation > self.generation:
            raise fenced(self.sink)
        return records

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self.translate(error) from None

    def translate(self, error: KafkaException) -> HeadwaterError:
        """Ours for a failure after which the transaction is not and will not be committed."""
        reason = error.args[0]
        if reason.code() in FENCED:
            stored = self.read().progress
            if stored is not None and stored.generation > self.generation:
                return fenced(self.sink)
        if reason.code() in _REFUSED:
            message = f"the broker refuses what sink {self.sink} sends"
            return DefiniteError("SINK_ROW_REFUSED", message, detail=str(reason.name()))
        message = f"the target of sink {self.sink} cannot be used now"
        hint = "is the broker up, and properties.bootstrap.server right? It is tried again by itself"
        return TransientError("SINK_UNREACHABLE", message, detail=str(reason.name()), hint=hint)


class Transaction:
    """One transaction of a sink's transactional id; `producer` 0 is the sink's own, the others send slices.

    with Transaction(place) as transaction:      # refused if a newer engine owns the sink
        transaction.send(files)
        transaction.commit({key: value})         # leaving without it aborts
    """

    def __init__(self, place: Place, producer: int = 0, *, owner_only: bool = True) -> None:
        self.place = place
        self._id = f"headwater.{place.sink}" + (f".{producer}" if producer else "")
        self._owner_only = owner_only
        self._producer: Any = None
        self.records: Records

    def __enter__(self) -> Transaction:
        with self.place.translated():
            before = self.place.read()
            if not self._owned(before):
                # Initialising would only disturb the owner's producer.
                self.records = before
                return self
            self._producer = Producer(self._properties(), logger=silent())
            self._producer.init_transactions(REQUEST_TIMEOUT_S)
            self.records = self.place.read()
        self._owned(self.records)
        return self

    def _owned(self, records: Records) -> bool:
        newer = records.progress is not None and records.progress.generation > self.place.generation
        if newer and self._owner_only:
            self._drop()
            raise fenced(self.place.sink)
        return not newer

    def __exit__(self, *_: object) -> None:
        self._drop()

    def send(self, files: Sequence[str]) -> None:
        """Begin, and send the messages of staged files."""
        with self._aborting():
            self._producer.begin_transaction()
            for keys, values in read_messages(files):
                for start in range(0, len(keys), MESSAGES_PER_CALL):
                    end = start + MESSAGES_PER_CALL
                    self._send([_message(k, v) for k, v in zip(keys[start:end], values[start:end], strict=True)])

    def _send(self, messages: list[dict[str, Any]]) -> None:
        """All of them; what did not fit into the client's queue is sent again when it has drained."""
        while True:
            self._producer.produce_batch(self.place.topic, messages)
            messages = [m for m in messages if "_error" in m]
            if not messages:
                return
            reasons = [m.pop("_error") for m in messages]
            if serious := [r for r in reasons if r.code() != KafkaError._QUEUE_FULL]:
                raise KafkaException(serious[0])
            self._producer.poll(0.1)

    def commit(self, records: Mapping[bytes, Mapping[str, Any] | str | None]) -> None:
        """Write records and commit all of it; an error says whether it may have landed."""
        with self._aborting():
            for key, value in records.items():
                text = None if value is None else value if isinstance(value, str) else json.dumps(value)
                data = None if text is None else text.encode()
                self._producer.produce(self.place.progress_topic, key=key, value=data, partition=0)
        self._commit()

    def begin(self) -> Transaction:
        """A transaction without messages."""
        self.send(())
        return self

    def _commit(self) -> None:
        for _ in range(COMMIT_TRIES):
            try:
                self._producer.commit_transaction(REQUEST_TIMEOUT_S * 2)
                return
            except KafkaException as error:
                reason = error.args[0]
                if reason.retriable() and not reason.txn_requires_abort():
                    continue
                if reason.txn_requires_abort() or reason.code() in FENCED:
                    self._abort()
                    raise self.place.translate(error) from None
                break
        self._drop()
        message = f"the outcome of a transaction of sink {self.place.sink} is not known"
        raise IndeterminateError("SINK_COMMIT_UNKNOWN", message)

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            self._abort()
            raise self.place.translate(error) from None
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        with contextlib.suppress(KafkaException):
            self._producer.abort_transaction(REQUEST_TIMEOUT_S)
        self._drop()

    def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(0)

    def _properties(self) -> dict[str, Any]:
        return {
            # The partition of a key is the one that Java producers choose.
            "partitioner": "murmur2_random",
            "linger.ms": 20,
            "compression.type": "lz4",
            # A topic that was deleted took what was delivered with it: a broker that makes it again would hide that.
            "allow.auto.create.topics": False,
            **self.place.client_properties(),
            "transactional.id": self._id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
        }


def _read(value: bytes | None) -> Any:
    return json.loads(value) if value is not None else None


def _listed(key: bytes | None) -> list[str]:
    """The parts of a record's key; others may keep what they like in the topic."""
    try:
        parts = json.loads(key) if key is not None and key.startswith(b"[") else []
    except ValueError:
        return []
    return [str(p) for p in parts]


def _message(key: bytes | None, value: bytes | None) -> dict[str, Any]:
    return {"key": key, "value": value}


def silent() -> Any:
    """The client's own log lines go to our log at debug level only: a lost connection is reported by us, once."""

    class Quiet(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logging.getLogger("headwater.kafka").debug("%s", record.getMessage())

    logger = logging.getLogger("headwater.kafka.client")
    if not logger.handlers:
        logger.addHandler(Quiet())
        logger.propagate = False
    return logger
