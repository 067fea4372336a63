"""What tasks are reading and have read: small files that they write, and that they and the engine look for meanwhile.

Spark gives results when a job has ended. So a job would have to be short for its splits to be handed over, and shown,
soon; but each job costs what reading some 100,000 rows costs. With notes it may be long.

    <folder>/<split>-<random>.json    one result of a task, complete; a task that is tried again leaves those alone
    <folder>/<split>.claim            which of several readers has begun the split: the others leave it alone

A note is never the only way: what a job gives at its end counts as well. A split that was claimed and whose reader died
is read when the engine asks again, with another folder. Whoever made the folder deletes it.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from typing import Any, Self

from headwater.storage.files import DataDir
from headwater.storage.private import FILE


@dataclass(frozen=True, slots=True)
class Notes:
    """A folder of notes; picklable, so that tasks can have it."""

    data_dir: DataDir
    folder: str

    @classmethod
    def fresh(cls, data_dir: DataDir) -> Self:
        notes = cls(data_dir, f"staging/reads/{uuid.uuid4().hex}")
        data_dir.make(notes.folder)
        return notes

    def write(self, split_id: int, result: dict[str, Any]) -> None:
        with self.data_dir.create(f"{self.folder}/{split_id}-{uuid.uuid4().hex}.json") as out:
            out.write(json.dumps(result).encode())

    @property
    def can_claim(self) -> bool:
        """Whether several readers can be told the same splits: a local file can be made by one of them only."""
        return self.data_dir.is_local

    def claim(self, split_id: int, reader: int) -> bool:
        """Whether this reader is to read the split: the first one that asks is, also if its task is tried again."""
        if not self.can_claim:
            return True
        _, path = self.data_dir.path(f"{self.folder}/{split_id}.claim")
        try:
            made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE)
        except FileExistsError:
            with open(path, "rb") as claimed:
                return claimed.read() == str(reader).encode()
        with open(made, "wb") as claim:
            claim.write(str(reader).encode())
        return True

    def begun(self) -> set[int]:
        """The splits that were claimed or read."""
        names = (name.rsplit("/", 1)[-1] for name, _ in self.data_dir.list(self.folder))
        return {int(name.partition("." if name.endswith(".claim") else "-")[0]) for name in names}

    def read(self) -> dict[int, dict[str, Any]]:
        """The results by split; of several for one split any: each is that of a whole read."""
        found = {}
        for name, _ in self.data_dir.list(self.folder):
            if not name.endswith(".json"):
                continue
            fs, path = self.data_dir.path(name)
            try:
                with fs.open_input_stream(path) as source:
                    result = json.loads(source.read())
            except (OSError, ValueError):
                continue  # it is being written
            found[int(result["split_id"])] = result
        return found

    def delete(self) -> None:
        self.data_dir.delete([self.folder])
