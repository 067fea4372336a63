"""Keeping an Iceberg target small: old snapshots of the sink expire, manifests are merged, dead files are removed.

Every commit adds a snapshot and a manifest, and every commit and every reader's plan goes through all of them: without
this module a commit costs 45 ms at the start and a second after 300 batches. `tidy` is one commit of its own, made now
and then after a batch; it changes no row.

    <table>/headwater-expired-<sink>/<ms>.json    {"files": […]}   what an expiry left without a snapshot

Safe, because only snapshots that this sink made are expired, never a head, a tag or a branch; because only files that
an expired one held and no remaining one holds are listed; and because they are removed `FILES_KEPT_S` later, when
whoever had planned a read from an expired snapshot has finished it. A crash in between leaves files behind, never a
snapshot without its files.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pyarrow import fs
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update.snapshot import ExpireSnapshots

from headwater.sink.lake import filesystem_of

STEP: Final = 25  # that many snapshots too many before a commit is spent on them
FILES_KEPT_S: Final = 3_600.0
# Merging is off by default in pyiceberg; below this number of manifests it is not worth a rewrite.
MERGING: Final = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "8"}


def superfluous(table: Table, sink: str, keep: int) -> list[Snapshot]:
    """The sink's own snapshots beyond the newest `keep`, once there are enough of them to be worth a commit."""
    heads = {ref.snapshot_id for ref in table.metadata.refs.values()}
    own = [s for s in table.metadata.snapshots if s.summary is not None and s.summary.get("headwater.sink") == sink]
    own.sort(key=lambda s: s.timestamp_ms)
    old = own[: max(0, len(own) - keep)]
    return [s for s in old if s.snapshot_id not in heads] if len(old) >= STEP else []


def tidy(table: Table, sink: str, marks: dict[str, str], old: Sequence[Snapshot], garbage: str) -> None:
    """Expire `old`, merge manifests, note what that leaves. Gives up where another writer was first."""
    ids = {s.snapshot_id for s in old}
    held = _files_of(table, old)
    transaction = Transaction(table, autocommit=False)
    transaction.set_properties({**marks, **MERGING})
    update = transaction.update_snapshot(snapshot_properties={"headwater.sink": sink, "headwater.epoch": ""})
    with update.merge_append():
        pass  # no rows: a snapshot like the last, over merged manifests
    ExpireSnapshots(transaction=transaction).by_ids(sorted(ids)).commit()
    try:
        now = transaction.commit_transaction()
    except CommitFailedException:
        return
    dead = held - _files_of(now, now.metadata.snapshots)
    if dead:
        _note(garbage, dead)
    sweep(garbage, str(table.location()))


def _files_of(table: Table, snapshots: Iterable[Snapshot]) -> set[str]:
    """Manifest lists, manifests and data files that the snapshots need."""
    found: set[str] = set()
    for snapshot in snapshots:
        found.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in found:
                found.add(manifest.manifest_path)
                found |= {e.data_file.file_path for e in manifest.fetch_manifest_entry(table.io, discard_deleted=True)}
    return found


def _note(garbage: str, dead: Iterable[str]) -> None:
    filesystem, root = filesystem_of(garbage)
    filesystem.create_dir(root, recursive=True)
    with filesystem.open_output_stream(f"{root}/{int(time.time() * 1000)}.json") as out:
        out.write(json.dumps({"files": sorted(dead)}).encode())


def sweep(garbage: str, location: str, *, now_s: float | None = None) -> None:
    """Remove what was noted long enough ago; nothing outside of the table's own directory."""
    filesystem, root = filesystem_of(garbage)
    due = ((time.time() if now_s is None else now_s) - FILES_KEPT_S) * 1000
    for info in filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True)):
        stem = info.base_name.removesuffix(".json")
        if not stem.isdigit() or int(stem) > due:
            continue
        with filesystem.open_input_stream(info.path) as file:
            files = json.loads(file.read())["files"]
        for path in files:
            if path.startswith(f"{location}/"):
                _remove(path)
        filesystem.delete_file(info.path)


def _remove(url: str) -> None:
    filesystem, path = filesystem_of(url)
    with contextlib.suppress(FileNotFoundError):
        filesystem.delete_file(path)
    # A staging directory goes with the last of its data files; Spark's own marks in it are nothing to keep.
    directory = path.rsplit("/", 1)[0]
    while "/headwater-" in directory:
        if _has_data(filesystem, directory):
            return
        filesystem.delete_dir(directory)
        directory = directory.rsplit("/", 1)[0]


def _has_data(filesystem: Any, directory: str) -> bool:
    selector = fs.FileSelector(directory, recursive=True, allow_not_found=True)
    return any(i.path.endswith(".parquet") for i in filesystem.get_file_info(selector))
