"""Somebody who reads a page of the documentation and does what it says, block by block, against real servers.

What a fenced block means follows from its language:

    sql            statements for the running engine (`headwater sql`)
    sql postgres   statements for the source
    bash           commands; `headwater run` becomes the running engine, ctrl-C ends it when another one begins
    python         a script of its own, in the order of the page, with the names that earlier ones defined
    text           what the block before it prints

A line "`name.py`:" before a block makes it a file of that name; `<!-- not run: reason -->` leaves it out.
Everything else in the pages is literal, but for the table of `Reader.adapted`: addresses, folders, moments.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

from engine_process import COMMAND, START_S, environment
from headwater.cli.commands import app
from headwater.connectors.postgres.client import parse_lsn
from headwater.testing.servers import PostgresServer, free_port

_FENCE: Final = re.compile(r"^```(.*)$")
_NOT_RUN: Final = re.compile(r"^<!-- not run: (.+) -->$")
_FILE: Final = re.compile(r"^`([\w./-]+\.\w+)`[^`]*:$")
KINDS: Final = frozenset({"sql", "sql postgres", "bash", "python", "text", "yaml"})
EARLIER, LATER = "11636563980517376", "11636564243709952"  # the epochs that the pages show
SETTLE_S: Final = 120.0


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str
    file: str = ""  # the block is this file
    not_run: str = ""  # and why

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.kind})\n{self.text}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, each with what the line before it says of it."""
    found, before, lines = [], "", iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            before = line.strip() or before
            continue
        body = []
        for _, inner in lines:
            if inner == "```":
                break
            body.append(inner + "\n")
        mark, name = _NOT_RUN.match(before), _FILE.match(before)
        found.append(
            Block(page.name, number, fence[1], "".join(body), name[1] if name else "", mark[1] if mark else "")
        )
        before = ""
    return found


class Reader:
    """With a folder to work in, a Postgres that is both source and warehouse, and a terminal."""

    def __init__(self, place: Path, server: PostgresServer, addresses: dict[str, str]) -> None:
        self.place, self.server = place, server
        self.addresses = addresses  # of `mysql` and `kafka`, where they are there
        self.output = ""
        self.exported: dict[str, str] = {}
        self.names: dict[str, Any] = {}
        self.http_port = free_port()
        self._engine: subprocess.Popen[bytes] | None = None
        self.log = place / "engine.log"

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, page: Path) -> None:
        for block in blocks(page):
            if not block.not_run and not self._lacks(block):
                print(f"{time.strftime('%X')} {block}")  # pytest shows it when something fails
                self.do(block)

    def _lacks(self, block: Block) -> bool:
        """A server that is not on this machine."""
        names = {"'mysql'": "mysql", "'kafka:9092'": "kafka", "'verify-full'": "tls"}
        return any(sign in block.text and name not in self.addresses for sign, name in names.items())

    def do(self, block: Block) -> None:
        text = self.adapted(block.text)
        if block.file:
            (self.place / block.file).write_text(text)
            return
        match block.kind:
            case "sql postgres":
                self.server.execute(*(x for x in text.split(";\n") if x.strip()), database="shop")
                self.wait_for_source()
            case "sql":
                self.output = self.headwater("sql", "-c", text)
            case "bash":
                self.output = "".join(self.command(line) for line in _commands(text))
            case "python":
                if "headwater.Engine(" in text:
                    self.stop()  # it is the engine of that data directory now
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(text, f"{block.page}:{block.line}", "exec"), self.names)
                self.output = out.getvalue()
            case "text":
                assert self.output == block.text
            case _:
                raise AssertionError(f"nobody knows how to do this: {block}")

    def adapted(self, text: str) -> str:
        """What every reader puts in their own values for."""
        host, port = self.server.host, self.server.port
        text = re.sub(r"/(exports|lake|srv|tmp|data)(?=[/'])", self._folder, text)
        text = re.sub(
            r"hostname(\s*=\s*)'(?:db|dwh|localhost)'(,\s*port\s*=\s*'5432')?",
            rf"hostname\1'{host}', port='{port}'",
            text,
        )
        text = re.sub(r"--hostname \w+", f"--hostname {host} --port {port}", text).replace(
            "@db:5432", f"@{host}:{port}"
        )
        text = text.replace("hostname='mysql'", f"hostname='{host}', port='{self.addresses.get('mysql')}'")
        text = text.replace("kafka:9092", str(self.addresses.get("kafka")))
        text = text.replace("/etc/ssl/shop-ca.pem", str(self.addresses.get("tls")))
        text = text.replace("127.0.0.1:8734", f"127.0.0.1:{self.http_port}")
        if EARLIER in text or LATER in text:
            first, last = self._epochs()
            text = text.replace(EARLIER, str(first)).replace(LATER, str(last))
        text = text.replace("'2026-11-15 12:00:00'", f"'{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M:%S.%f}'")
        return text.replace("CANCEL JOBS 3", f"CANCEL JOBS {self._job_being_created()}") if "CANCEL" in text else text

    def _folder(self, match: re.Match[str]) -> str:
        """A folder of ours for one that belongs to the reader's machine; `/data` is where the data directory is."""
        folder = self.place if match[1] == "data" else self.place / match[1]
        folder.mkdir(exist_ok=True)
        return str(folder)

    def _epochs(self) -> tuple[int, int]:
        """Two checkpoints that hold everything which the page has made so far."""
        self.headwater("sql", "-c", "FLUSH; FLUSH")
        epochs = sorted({int(row["epoch"]) for row in self.rows("SELECT epoch FROM hw_catalog.hw_epochs")})
        return epochs[-2], epochs[-1]

    def _job_being_created(self) -> int:
        self.headwater(
            "sql", "-c", "CREATE TABLE endless (*) FROM shop TABLE 'public.orders' WITH (backfill.rate_limit='0')"
        )
        return int(self.rows("SELECT id FROM hw_catalog.hw_jobs WHERE name = 'endless'")[0]["id"])

    # -- a terminal -------------------------------------------------------------------------------------------------

    def command(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.exported |= {name: os.environ[name] if value == "…" else value}  # a secret is the test's own
            os.environ.update(self.exported)
            return ""
        assert words.pop(0) == "headwater", f"not a command that this test knows: {line}"
        if "run" in words[:2]:
            return self.run(words)
        if "--watch" in words:
            return self._watch(words)
        return self.headwater(*words)

    def headwater(self, *words: str) -> str:
        """One command to its end, in this process: a new one would take a second of imports."""
        if words[0] not in ("init", "check"):
            self.start()
        done = CliRunner().invoke(app, list(words))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, f"{shlex.join(words)}: {done.output}"
        return done.stdout

    def run(self, words: list[str]) -> str:
        """The engine; with --until-caught-up it must end by itself."""
        self.stop()
        folder = Path(words[words.index("--data-dir") + 1]) if "--data-dir" in words else self.data_dir
        with self.log.open("ab") as out:
            self._engine = subprocess.Popen(
                [*COMMAND, *words], stdout=out, stderr=out, cwd=self.place, env=environment()
            )
        if "--until-caught-up" in words:
            assert self._engine.wait(START_S) == 0, self._said()
            self._engine = None
            return ""
        deadline = time.monotonic() + START_S
        while not (folder / "endpoint.json").exists():
            assert self._engine.poll() is None and time.monotonic() < deadline, self._said()
            time.sleep(0.1)
        return ""

    def start(self) -> None:
        """An engine on the usual data directory, for commands that a reader gives in a second terminal."""
        if not (self.data_dir / "endpoint.json").exists():
            self.run(["run", "--allow-python"])  # where a page needs it, it says so

    def stop(self) -> None:
        """Ctrl-C."""
        engine, self._engine = self._engine, None  # one that ended badly is told of once
        if engine is not None:
            engine.send_signal(signal.SIGINT)
            assert engine.wait(60) == 0, self._said()

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _watch(self, words: list[str]) -> str:
        """Until it has shown something; then ctrl-C."""
        with subprocess.Popen(
            [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.place, text=True
        ) as it:
            assert it.stdout is not None
            said = next((line for line in it.stdout if "live" in line), "")
            it.send_signal(signal.SIGINT)
            it.wait(60)
        assert it.returncode == 0 and said
        return said

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def data_dir(self) -> Path:
        return self.place / os.environ.get("HEADWATER_DATA_DIR", "headwater-data")

    def empty(self) -> None:
        """Drop everything, what depends on others first."""
        drops = {"sink": "SINK", "view": "MATERIALIZED VIEW", "table": "TABLE", "source": "SOURCE"}
        jobs = self.rows("SELECT id, name, kind FROM hw_catalog.hw_jobs")
        jobs.sort(key=lambda job: (list(drops).index(job["kind"]), -job["id"]))
        if jobs:
            self.headwater(
                "sql", "-c", "; ".join(f"DROP {drops[job['kind']]} IF EXISTS `{job['name']}`" for job in jobs)
            )

    def rows(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.headwater("sql", "--format", "json", "-c", query))
        return found

    def wait_for_source(self) -> None:
        """`A second later`: until a committed epoch holds what was written on the source."""
        if self._engine is None:
            return
        with self.server.connect("shop") as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        for _ in self._patiently("the engine did not follow the source"):
            positions = [parse_lsn(x["position"]) for x in self.rows("SELECT position FROM hw_catalog.hw_sources")]
            if all(p >= parse_lsn(str(row[0])) for p in positions):
                return

    def settle(self) -> None:
        """Everything that the page made is live and delivered, and nothing has complained."""
        self.headwater("sql", "-c", "WAIT")
        for _ in self._patiently("not everything was delivered"):
            owed = self.rows("SELECT sink FROM hw_catalog.hw_log_stores WHERE backlog_rows > 0 OR delivered_to IS NULL")
            states = {r["name"]: r["state"] for r in self.rows("SELECT name, state FROM hw_catalog.hw_jobs")}
            assert self.rows("SELECT * FROM hw_catalog.hw_errors WHERE NOT retrying") == []
            if not owed and set(states.values()) <= {"live"}:
                return

    def _patiently(self, otherwise: str) -> Iterator[None]:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            yield
            time.sleep(0.3)
        raise AssertionError(otherwise)


def _commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
