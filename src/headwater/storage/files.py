"""The data directory: a local path by default, or any URL that both Spark and `pyarrow.fs` reach.

    meta.db          the embedded meta store         endpoint.json   where a running engine listens (0600)
    engine.lock      held by the running engine      spool/<source>  raw change streams
    tables/<id>/     segments                        staging/        rows on their way into an epoch
    meta-store.url   where the meta store is instead of meta.db
    cache/           of segments that are looked into often; can be deleted at any time

Paths in the meta store are relative to it, so that a copied directory is a working one.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow.fs as pafs


@dataclass(frozen=True, slots=True)
class DataDir:
    """A data directory by its path or URL; picklable, so that tasks can use it."""

    root: str

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
        fs, root = self.filesystem()
        return fs, f"{root.rstrip('/')}/{relative}"

    def make(self, relative: str) -> None:
        fs, path = self.path(relative)
        fs.create_dir(path, recursive=True)

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
