"""What an earlier engine left in the data directory: files that it staged and did not commit (I8), empty folders.

The names are taken at the start, before anything new is staged: whatever has one of them and is not known to the meta
store then never will be, because no name is given twice. So the removal itself may run beside the work, a part at a
time: an older build left a folder for each refresh of a view, a hundred thousand in a day.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from headwater.storage.files import CACHE, DataDir, control_file, table_folder

# Before the engine goes on: all there is after a crash, in well under a second.
AT_ONCE: Final = 2_000
AT_A_TIME: Final = 500


class Sweep:
    """`known`: every path that the meta store refers to; `jobs`: the ids of all jobs that it still has."""

    def __init__(self, data_dir: DataDir, known: set[str], jobs: set[int]) -> None:
        self.data_dir = data_dir
        self._known = known
        self._in_use = {path.rpartition("/")[0] for path in known}
        data_dir.delete(["staging", CACHE])
        tables = [path for path, folder in data_dir.entries("tables") if folder]
        found = [entry for table in tables for entry in data_dir.entries(table)]
        stale = [path for path, folder in found if not folder and path not in known]
        wanted = {control_file(job_id) for job_id in jobs}
        stale += [path for path, _ in data_dir.entries("control") if path not in wanted]
        self._left: deque[tuple[str, bool]] = deque((path, False) for path in stale)
        self._left += ((path, True) for path, folder in found if folder)
        kept = {table_folder(job_id) for job_id in jobs}
        self._tables = [path for path in tables if path not in kept]

    def some(self, count: int) -> bool:
        """Remove that many of what is left; whether there is more."""
        part = [self._left.popleft() for _ in range(min(count, len(self._left)))]
        self.data_dir.delete(path for path, folder in part if not folder)
        for path, folder in part:
            if folder:
                self._sweep_folder(path)
        if not self._left:
            self.data_dir.remove_empty(self._tables)
        return bool(self._left)

    def _sweep_folder(self, folder: str) -> None:
        if folder in self._in_use:
            self.data_dir.delete(path for path, _ in self.data_dir.list(folder) if path not in self._known)
            return
        self.data_dir.remove_empty([folder])
        self.data_dir.delete([folder])  # it was not empty
