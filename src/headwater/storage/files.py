"""The data directory: an absolute path that the engine and every worker of Spark see (`location.py` refuses others).

    meta.db          the embedded meta store         endpoint.json   where a running engine listens (0600)
    engine.lock      held by the running engine      spool/<source>  raw change streams
    tables/<id>/     segments                        staging/        rows on their way into an epoch
    meta-store.url   where the meta store is instead of meta.db
    shared/          by which workers know that they see the engine's own directory (`shared.py`)
    cache/           of segments that are looked into often; can be deleted at any time

Paths in the meta store are relative to it, so that a copied directory is a working one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow.fs as pafs

from headwater.storage.private import DIRECTORY, FILE, new_file
from headwater.storage.shared import require_mark


@dataclass(frozen=True, slots=True)
class DataDir:
    """A data directory by its path; picklable, so that tasks can use it.

    `mark`: what the engine that owns it has put there. Whoever has a marked one makes and reads nothing elsewhere.
    """

    root: str
    mark: str = ""

    @property
    def is_local(self) -> bool:
        return "://" not in self.root or self.root.startswith("file://")

    def url(self, relative: str) -> str:
        """What Spark and pyarrow can open."""
        return f"{self.root.rstrip('/')}/{relative}"

    def relative(self, url: str) -> str:
        """The way back of `url`; what lies elsewhere stays as it is."""
        return url.removeprefix(f"{self.root.rstrip('/')}/")

    def filesystem(self) -> tuple[pafs.FileSystem, str]:
        """The file system and the root inside it."""
        if "://" in self.root:
            found: tuple[pafs.FileSystem, str] = pafs.FileSystem.from_uri(self.root)
            return found
        return pafs.LocalFileSystem(), self.root

    def path(self, relative: str) -> tuple[pafs.FileSystem, str]:
        self.require_mark()
        fs, root = self.filesystem()
        return fs, f"{root.rstrip('/')}/{relative}"

    def require_mark(self) -> None:
        """TransientError DATA_DIRECTORY_NOT_SHARED where this process does not see the engine's own directory."""
        if self.mark:
            require_mark(self.root, self.mark)

    def make(self, relative: str) -> None:
        """A folder and those above it, never the data directory itself: where that is missing, something is amiss."""
        fs, path = self.path(relative)
        if not isinstance(fs, pafs.LocalFileSystem):
            fs.create_dir(path, recursive=True)
        elif not os.path.isdir(path):
            parts = relative.split("/")
            for i in range(len(parts)):
                with contextlib.suppress(FileExistsError):  # another task makes it just now
                    os.mkdir(self.path("/".join(parts[: i + 1]))[1], DIRECTORY)

    def make_parent(self, relative: str) -> None:
        """The folder of a file."""
        if folder := relative.rpartition("/")[0]:
            self.make(folder)

    def create(self, relative: str) -> Any:
        """An output stream to a new file; its folder is made if need be."""
        self.make_parent(relative)
        return new_file(*self.path(relative))

    def close_to_others(self, relative: str) -> None:
        """A file that was made by somebody who does not know our modes."""
        fs, path = self.path(relative)
        if isinstance(fs, pafs.LocalFileSystem):
            os.chmod(path, FILE)

    def delete(self, relatives: Iterable[str]) -> int:
        """Delete files, or directories, that may be gone already; gives how many were there.

        The folder of a run (`segment_folder`) goes with its last file.
        """
        count = 0
        folders: set[str] = set()
        for relative in relatives:
            if is_run_folder(folder := relative.rpartition("/")[0]):
                folders.add(folder)
            fs, path = self.path(relative)
            info = fs.get_file_info(path)
            if info.type == pafs.FileType.File:
                fs.delete_file(path)
                count += 1
            elif info.type == pafs.FileType.Directory:
                fs.delete_dir(path)
                count += 1
        self.remove_empty(folders)
        return count

    def remove_empty(self, folders: Iterable[str]) -> None:
        """Remove folders that hold nothing; others, and those that are gone, stay as they are."""
        if not self.is_local:
            return  # an object store has no folders
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(self.path(folder)[1])

    def entries(self, relative: str) -> Iterator[tuple[str, bool]]:
        """What a folder holds, one level deep, relative to the data directory: (path, whether it is a folder)."""
        fs, path = self.path(relative)
        if self.is_local:  # names alone: a folder may hold a hundred thousand
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as found:
                yield from ((f"{relative}/{e.name}", e.is_dir(follow_symlinks=False)) for e in found)
            return
        for info in fs.get_file_info(pafs.FileSelector(path, allow_not_found=True)):
            yield f"{relative}/{info.base_name}", info.type == pafs.FileType.Directory

    def list(self, relative: str) -> list[tuple[str, int]]:
        """All files below a folder with their sizes, relative to the data directory."""
        fs, root = self.filesystem()
        _, path = self.path(relative)
        selector = pafs.FileSelector(path, recursive=True, allow_not_found=True)
        prefix = len(root.rstrip("/")) + 1
        return [(i.path[prefix:], i.size) for i in fs.get_file_info(selector) if i.type == pafs.FileType.File]


CACHE: Final = "cache"
# What a name may have in a path as it is. Other signs of ASCII mean something in paths, URLs or patterns.
_AS_IT_IS: Final = re.compile(r"[\w .,+@()$&!'=;-]")
_MAX_PART_BYTES: Final = 120  # a file system takes 255, and others put something before and behind it


def path_part(name: str) -> str:
    """A name from a statement as one part of a path: no two names have the same, and none leads elsewhere.

    Letters, digits and most signs stay, so that a person finds it; others, and a dot at the beginning, are written
    `~2f` (`%` would be read back by whoever takes the path for a URL). A long name is cut, and ends with a
    sum of itself.
    """
    kept = [c if _AS_IT_IS.fullmatch(c) and not (c == "." and i == 0) else _spelt(c) for i, c in enumerate(name)]
    part = "".join(kept) or "~"
    if len(part.encode()) <= _MAX_PART_BYTES:
        return part
    total = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{part.encode()[:_MAX_PART_BYTES].decode(errors='ignore')}~~{total}"


def _spelt(character: str) -> str:
    return "".join(f"~{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))


def cache_entry(path: str) -> str:
    """The folder of a segment in the cache (`spark/segment_index.py`)."""
    return f"{CACHE}/{path.removeprefix('tables/').removesuffix('.parquet').replace('/', '-')}"


def segment_path(table_id: int, folder: str | None = None) -> str:
    """A fresh name for a segment; never reused, so that a retried task cannot clash with its first attempt."""
    return f"{folder or f'tables/{table_id}'}/{uuid.uuid4().hex}.parquet"


def segment_folder(table_id: int) -> str:
    """A fresh folder for the segments of one run: what a failed one has written can be deleted as a whole."""
    return f"tables/{table_id}/{uuid.uuid4().hex}"


def is_run_folder(folder: str) -> bool:
    return folder.startswith("tables/") and folder.count("/") == 2


def table_folder(table_id: int) -> str:
    return f"tables/{table_id}"


def control_file(table_id: int) -> str:
    """What a running copy of a table looks into: its rate limit."""
    return f"control/{table_id}.json"
