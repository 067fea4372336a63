"""Files that only their owner may touch: how those of a data directory are made, and whose are followed.

Folders are 0700 and files 0600 whatever the umask. The umask of the engine's process is not changed, because it may be
a user's own program, and because targets of sinks (files, Delta, Iceberg, a user's class) are for others to read:
what is ours is made with its mode instead. Spark's JVM and the readers, which write nothing for others but what Hadoop
gives a mode of its own, have a umask of 077; Spark's Python workers, which run tasks of sinks, have the engine's.

A data directory says where its meta store is, and what to run: one that somebody else may have filled is not followed
(`check_owner`), as git does with its `safe.directory`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import UsageError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

UMASK: Final = 0o077
WORKERS_UMASK: Final = "HEADWATER_UMASK"  # in the environment of the JVM, for the workers that it starts
DIRECTORY: Final = 0o700
FILE: Final = 0o600
OTHERS: Final = 0o077
WRITABLE_BY_OTHERS: Final = 0o022
SAFE_DIRECTORY: Final = "HEADWATER_SAFE_DIRECTORY"
# What a data directory leads to: a connection with secrets, a process that is sent statements, code to load.
FOLLOWED: Final = ("meta-store.url", "endpoint.json", "meta.db", "meta.db-wal")

log = logging.getLogger("headwater")


# -- making ---------------------------------------------------------------------------------------------------------


def make_directory(path: Path | str) -> None:
    """A folder with those above it that are not there; each new one is 0700."""
    path = Path(path)
    missing = []
    while not path.is_dir():
        missing.append(path)
        if path == path.parent:
            break
        path = path.parent
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another task makes it just now
            one.mkdir(mode=DIRECTORY)


def make_file(path: Path | str) -> None:
    """An empty file, 0600, for a writer that cannot say a mode; one that is there stays as it is."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE))


def new_file(fs: FileSystem, path: str) -> Any:
    """An output stream to a new file, in a folder that is made if need be; private where the file system is local."""
    from pyarrow.fs import LocalFileSystem  # late: commands that only look at a directory do without Arrow

    if isinstance(fs, LocalFileSystem):
        make_directory(Path(path).parent)
        make_file(path)
    else:
        fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
    return fs.open_output_stream(path)


def current_umask() -> int:
    try:
        (text,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
        return int(text.split()[1], 8)
    except (OSError, ValueError):  # not Linux: it can only be read by setting it
        umask = os.umask(UMASK)
        os.umask(umask)
        return umask


@functools.cache
def temporary_directory(purpose: str) -> Path:
    """A folder of this user's own among the machine's temporary ones, the same at each call.

    A name in a place where everybody may make folders: one that is not ours, or open to others, is not used, and this
    process has another one then.
    """
    place = Path(tempfile.gettempdir()) / f"headwater-{purpose}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=DIRECTORY)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & OTHERS:
        log.warning("%s belongs to somebody else, or is open to others: another folder is used", place)
        return Path(tempfile.mkdtemp(prefix=f"headwater-{purpose}-"))
    return place


def tighten(directory: Path) -> None:
    """Close a data directory of ours that others can look into, with all that is in it.

    A closed one is not looked through again: nobody else can have opened what is in it.
    """
    if directory.stat().st_uid != os.geteuid() or not directory.stat().st_mode & OTHERS:
        return
    directory.chmod(DIRECTORY)
    count = 0
    for folder, _, files in os.walk(directory):
        count += _close(Path(folder), DIRECTORY)
        count += sum(_close(Path(folder, name), FILE) for name in files)
    if count:
        log.warning(
            "%s was open to other users: it and %d files and folders in it are now its owner's alone", directory, count
        )


def _close(path: Path, mode: int) -> bool:
    with contextlib.suppress(OSError):  # gone meanwhile, or not ours
        if not path.is_symlink() and path.stat().st_mode & OTHERS:
            path.chmod(mode)
            return True
    return False


# -- following ------------------------------------------------------------------------------------------------------


def check_owner(directory: Path) -> None:
    """UsageError DATA_DIRECTORY_FOREIGN for a data directory that somebody else may have filled; else nothing.

    Looked at: the directory, a link that leads to it, and those of its files that lead elsewhere. Each must belong to
    the caller or to root, and must not be writable by others. A directory that is not there, or empty, is fine.
    """
    if _trusted_by_name(directory):
        return
    for path in (directory, *(directory / name for name in FOLLOWED)):
        for found in _stats(path):
            if found.st_uid not in _trusted_users():
                raise _foreign(directory, path, f"belongs to user {found.st_uid}", owner=True)
            if found.st_mode & WRITABLE_BY_OTHERS and not stat.S_ISLNK(found.st_mode) and not _is_empty(path):
                raise _foreign(directory, path, "can be written to by other users", owner=False)


def _stats(path: Path) -> list[os.stat_result]:
    """Of the name itself, and of what it leads to if it is a link; nothing of what is not there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        own = path.lstat()
        return [own, path.stat()] if stat.S_ISLNK(own.st_mode) else [own]
    return []


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _trusted_users() -> set[int]:
    """The caller and root; for root by `sudo` also whoever called that."""
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        trusted.add(int(os.environ["SUDO_UID"]))
    return trusted


def _trusted_by_name(directory: Path) -> bool:
    named = [Path(n) for n in os.environ.get(SAFE_DIRECTORY, "").split(os.pathsep) if n]
    return any(n.absolute() == directory.absolute() for n in named)


def _foreign(directory: Path, path: Path, what: str, *, owner: bool) -> UsageError:
    trust = f"{SAFE_DIRECTORY}={directory.absolute()}"
    close = f"chmod -R go-rwx {directory.absolute()} if nobody else has written there"
    return UsageError(
        "DATA_DIRECTORY_FOREIGN",
        f"{path} {what}, and is not followed",
        detail="whoever fills a data directory decides where your secrets and statements are sent",
        hint=f"use a directory of your own, or, if you trust this one, {trust}" if owner else close,
    )
