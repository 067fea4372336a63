"""`endpoint.json` in the data directory: how a command on the same machine finds the running engine, and proves itself.

    {"url": "http://127.0.0.1:8734", "token": "…", "pid": 4711, "generation": 3, "read_token": "…"}

Only the owner may read it (0600): the token is the right to run every statement, the read token that to run queries and
to look (`model/trust.py`). It is written again by each engine and
renamed into place, so that a reader sees a whole file or none. A file left by a killed engine is harmless: a reader
asks `/healthz`, and the next engine replaces it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import secrets
import socket
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from headwater.errors import UsageError, disk_full, is_disk_full
from headwater.storage.holders import Holder, living, lock_holder
from headwater.storage.private import check_owner, make_directory, tighten

FILE_NAME: Final = "endpoint.json"
LOCK_NAME: Final = "engine.lock"
# 256 bits: not to be guessed, and short enough for a line in a terminal.
TOKEN_BYTES: Final = 32
HIGHEST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens. Tokens are left out of `repr`, so that they cannot get into a log by accident."""

    url: str
    token: str = field(repr=False)
    pid: int
    generation: int
    read_token: str = field(default="", repr=False)

    @property
    def page(self) -> str:
        """The page's address for a person to open. What follows the `#` stays in the browser, and goes to no server."""
        return f"{self.url}/#token={self.token}"


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `:PORT` or `[::1]:PORT`; port 0 is any free one."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > HIGHEST_PORT or "/" in host:
        raise UsageError("OPTION_VALUE", f"--http {text}: write HOST:PORT", hint="--http 127.0.0.1:8734")
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can come to an address; a name counts by the addresses that it has."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def write_endpoint(data_dir: Path, endpoint: Endpoint) -> Path:
    """Puts the file in place, readable by its owner only from its first moment."""
    target = data_dir / FILE_NAME
    descriptor, temporary = tempfile.mkstemp(dir=data_dir, prefix=f".{FILE_NAME}.")  # made with mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(endpoint), file)
            file.write("\n")
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def read_endpoint(data_dir: Path) -> Endpoint | None:
    """What the file says; None when there is none or it makes no sense. Says nothing on whether the engine lives."""
    try:
        found = json.loads((data_dir / FILE_NAME).read_text())
        return Endpoint(
            url=str(found["url"]),
            token=str(found["token"]),
            pid=int(found["pid"]),
            generation=int(found["generation"]),
            read_token=str(found.get("read_token", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_endpoint(data_dir: Path, generation: int) -> None:
    """Takes the file away at the end of an engine, unless a newer engine has written its own meanwhile."""
    found = read_endpoint(data_dir)
    if found is not None and found.generation == generation:
        (data_dir / FILE_NAME).unlink(missing_ok=True)


def lock_directory(data_dir: Path) -> int:
    """The right to run on this data directory, as an open file; it ends with the process, however that ends.

    The directory is made if it is not there, and closed to others if it is ours. The file says who holds it, for where
    the system cannot be asked.
    """
    _check_name(data_dir)
    check_owner(data_dir)
    try:
        make_directory(data_dir)
        tighten(data_dir)
        descriptor = os.open(data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full() from None
        raise UsageError(
            "DATA_DIRECTORY_UNUSABLE",
            f"{data_dir} cannot be used as the data directory",
            detail=error.strerror or type(error).__name__,
            hint="choose a directory that you may write to: --data-dir, or HEADWATER_DATA_DIR",
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise _running(data_dir) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
    return descriptor


def _check_name(data_dir: Path) -> None:
    """Python, Arrow and Java must mean the same file by a name: all of them take it as UTF-8."""
    name = str(data_dir.absolute())
    try:
        if os.fsencode(name) == name.encode():
            return
    except UnicodeError:
        pass
    raise UsageError(
        "DATA_DIRECTORY_UNUSABLE",
        f"the name of the data directory is not UTF-8: {name!a}",
        hint="run with LC_ALL=C.UTF-8, or choose a name of plain letters: --data-dir, or HEADWATER_DATA_DIR",
    )


def _running(data_dir: Path) -> UsageError:
    holder = lock_holder(data_dir / LOCK_NAME) or _noted_holder(data_dir)
    stopped = holder is not None and holder.stopped
    return UsageError(
        "ENGINE_RUNNING",
        "another engine runs on this data directory",
        detail=str(holder) if holder else "",
        hint=f"kill -CONT {holder.pid} lets it go on; or stop it, or use another --data-dir"
        if holder is not None and stopped
        else "send it commands (headwater sql, status, …), stop it, or use another --data-dir",
    )


def _noted_holder(data_dir: Path) -> Holder | None:
    """Who the lock's file says it is: on another host, or a living process of this one."""
    with contextlib.suppress(OSError, ValueError):
        host, pid = (data_dir / LOCK_NAME).read_text().split()
        return Holder(int(pid), host=host) if host != socket.gethostname() else living(int(pid))
    return None
