"""A slot that its server cannot decode any more (`could not map filenode`), made on purpose.

An old state of the slot is put back after what it needs is gone: a table was written to and then rewritten, and without
the slot VACUUM has removed the catalogue's row of its old file. The log itself is all there.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from headwater.testing.servers import PostgresServer


def make_unreadable(server: PostgresServer, slot: str, table: str, writes: Sequence[str], aside: Path) -> None:
    """`writes` are in the log, and the first of them is where decoding ends. No reader gets at the slot meanwhile."""
    server.stop()
    place = server.data / "pg_replslot" / slot
    shutil.copytree(place, aside)
    owner = place.stat()
    before = server.settings["max_wal_senders"]
    server.restart(settings={"max_wal_senders": "0", "wal_keep_size": "1GB"})
    server.execute(
        *writes,
        f"VACUUM FULL {table}",
        *writes,
        f"SELECT pg_drop_replication_slot('{slot}')",
        "VACUUM pg_class",
        "CHECKPOINT",
    )
    server.stop()
    shutil.copytree(aside, place)
    for path in [place, *place.iterdir()]:
        shutil.chown(path, owner.st_uid, owner.st_gid)
    server.restart(settings={"max_wal_senders": before})
