"""The meta store's SQL schema (SQLAlchemy Core) and its migrations. `meta.py` reads and writes it.

Epochs are stored as BIGINT. `removed_epoch` of what is still there is MAX_EPOCH, so that visibility is one comparison:
`added_epoch <= E AND E < removed_epoch`.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

SCHEMA_VERSION: Final = 2
MAIN_LANE: Final = "main"

metadata = sa.MetaData()

settings = sa.Table(
    "settings",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

owner = sa.Table(
    "owner",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("lane", sa.Text, nullable=False),
    sa.Column("definition", sa.Text, nullable=False),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("created_epoch", sa.BigInteger, nullable=False),
    sa.Column("live_epoch", sa.BigInteger, nullable=False),
    sa.Column("dropped_epoch", sa.BigInteger, nullable=False),
)

segments = sa.Table(
    "segments",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("table_id", sa.BigInteger, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("kind", sa.String(8), nullable=False),
    sa.Column("is_change", sa.Boolean, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("added_epoch", sa.BigInteger, nullable=False),
    sa.Column("removed_epoch", sa.BigInteger, nullable=False),
    sa.Index("segments_by_table", "table_id", "added_epoch"),
    sa.Index("segments_by_removal", "removed_epoch"),
    sa.Index("segments_present", "table_id", "removed_epoch"),
)

resets = sa.Table(
    "resets",
    metadata,
    sa.Column("table_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
)

epochs = sa.Table(
    "epochs",
    metadata,
    sa.Column("lane", sa.String(200), primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("committed_at", sa.Float, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
)

positions = sa.Table(
    "positions",
    metadata,
    sa.Column("source_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("position", sa.Text, nullable=False),
)

splits = sa.Table(
    "splits",
    metadata,
    sa.Column("table_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("split_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("left", sa.Text),
    sa.Column("right", sa.Text),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("offset_low", sa.Text),
    sa.Column("offset_high", sa.Text),
    sa.Column("staged_path", sa.Text),
    sa.Column("handed_over_epoch", sa.BigInteger),
)

job_states = sa.Table(
    "job_states",
    metadata,
    sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("part", sa.String(64), primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("value", sa.JSON, nullable=False),
)

pins = sa.Table(
    "pins",
    metadata,
    sa.Column("holder", sa.String(200), primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
)

errors = sa.Table(
    "errors",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("job_id", sa.BigInteger),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("code", sa.String(64), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("hint", sa.Text, nullable=False),
    sa.Column("retrying", sa.Boolean, nullable=False),
    sa.Column("ended_at", sa.Float),
)

dead_letters = sa.Table(
    "dead_letters",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("sink_id", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("code", sa.String(64), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("replayed", sa.Boolean, nullable=False),
    sa.Index("dead_letters_by_sink", "sink_id", "path"),
)

# One entry per step from version n to n + 1, each a list of SQL statements; a fresh store is created at SCHEMA_VERSION.
MIGRATIONS: Final[dict[int, list[str]]] = {
    1: [
        "ALTER TABLE errors ADD COLUMN ended_at FLOAT",
        "CREATE INDEX segments_present ON segments (table_id, removed_epoch)",
        "CREATE INDEX dead_letters_by_sink ON dead_letters (sink_id, path)",
    ],
}
