"""The way to a running engine over its loopback endpoint, and to one that lives for a single command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx

from headwater.cli.options import spark_settings
from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError
from headwater.server.endpoint import Endpoint, read_endpoint
from headwater.storage.location import require_meta_store
from headwater.storage.private import check_owner

USAGE_STATUS = 400
HEALTH_S = 5.0


class Session(Protocol):
    """Where statements go."""

    def run(self, statement: str) -> dict[str, Any] | None:
        """Run one statement: {"columns", "rows", "epoch"} of a query, None for other statements."""
        ...

    def status(self) -> dict[str, Any]: ...


class RemoteSession:
    """A running engine, over HTTP."""

    def __init__(self, endpoint: Endpoint) -> None:
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        self._http = httpx.Client(base_url=endpoint.url, headers=headers, timeout=None, trust_env=False)

    def run(self, statement: str) -> dict[str, Any] | None:
        answer = self._ask("POST", "/sql", json={"statement": statement})
        return answer if answer["columns"] else None

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "/status")

    def _ask(self, method: str, path: str, **extra: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **extra)
        except httpx.HTTPError as error:
            raise TransientError(
                "ENGINE_GONE",
                "the engine does not answer",
                detail=type(error).__name__,
                hint="see its log",
            ) from None
        data: dict[str, Any] = response.json()
        if "error" in data:
            raise _error(response.status_code, data["error"])
        return data


def _error(status: int, error: dict[str, str]) -> HeadwaterError:
    kind = UsageError if status == USAGE_STATUS else DefiniteError
    return kind(error["code"], error["message"], detail=error.get("detail", ""), hint=error.get("hint", ""))


class LocalSession:
    """An engine in this process, for the duration of a command."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run(self, statement: str) -> dict[str, Any] | None:
        results = self.engine.execute(statement)
        last = next((r for r in reversed(results) if r is not None), None)
        return None if last is None else {"columns": last.columns, "rows": last.rows, "epoch": last.epoch}

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.status()
        return found


def running_engine(data_dir: Path) -> Endpoint | None:
    """The endpoint of an engine that runs on this data directory and answers."""
    check_owner(data_dir)
    endpoint = read_endpoint(data_dir)
    if endpoint is None:
        return None
    try:
        httpx.get(f"{endpoint.url}/healthz", timeout=HEALTH_S, trust_env=False)
    except httpx.TimeoutException:
        return endpoint  # somebody listens, and is busy: the command waits for it
    except httpx.HTTPError:
        return None
    return endpoint


def only_reads(text: str) -> bool:
    """Whether statements change nothing; one that cannot be read ends them, and whoever runs them says so."""
    from headwater.readonly import READING
    from headwater.sql.parser import parse

    with contextlib.suppress(HeadwaterError):
        return all(isinstance(x, READING) for x in parse(text))
    return True


@contextlib.contextmanager
def session(
    data_dir: Path, *, text: str = "", make: bool = False, spark_conf: list[str] | None = None
) -> Iterator[Session]:
    """The running engine of a data directory; without one, its committed state for reading, or an engine of our own.

    `make`: a data directory that is not there is made for what changes something; else it is a mistake to name one.
    """
    endpoint = running_engine(data_dir)
    if endpoint is not None:
        yield RemoteSession(endpoint)
        return
    reads = bool(text) and only_reads(text)
    if reads or not make:
        require_meta_store(data_dir)
    if reads:
        from headwater.readonly import ReadOnlyEngine

        with ReadOnlyEngine(data_dir) as reader:
            yield LocalSession(reader)
        return
    from headwater.api import Engine

    with Engine(data_dir, spark_conf=spark_settings(spark_conf)) as engine:
        yield LocalSession(engine)
