"""Where the meta store of a data directory is: `meta.db` inside it, or the database that `meta-store.url` names.

That file holds the URL as the user gave it, its password only as a reference (`${ENV}`, `${file:path}`), so that every
later command on the data directory finds the same meta store. The password is resolved here, for a connection.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from headwater.config import is_reference, is_secret_name, resolve_secret
from headwater.errors import UsageError
from headwater.storage.private import check_owner, make_file

if TYPE_CHECKING:
    from sqlalchemy import URL

EMBEDDED: Final = "meta.db"
URL_FILE: Final = "meta-store.url"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def data_directory(given: str | os.PathLike[str]) -> Path:
    """The absolute path of a data directory, as a user gave it; UsageError for a URL that is none of this machine's."""
    text = os.fspath(given)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text).absolute()
    rest = text[scheme.end() :]
    if scheme[1].lower() == "file" and rest.startswith("/"):
        return Path(unquote(rest)).absolute()
    raise UsageError(
        "DATA_DIRECTORY_UNSUPPORTED",
        f"{scheme[0]}… cannot be the data directory in this version",
        hint="give a path, or file:///path; hosts of a cluster share one by mounting it (NFS, CephFS, EFS …)",
    )


def has_meta_store(data_dir: Path) -> bool:
    return (data_dir / EMBEDDED).exists() or (data_dir / URL_FILE).exists()


def require_meta_store(data_dir: Path) -> None:
    check_owner(data_dir)
    if not has_meta_store(data_dir):
        raise UsageError(
            "NO_DATA_DIRECTORY", f"there is no data directory {data_dir}", hint="headwater run FILE.sql makes one"
        )


def existing_meta_store(data_dir: Path) -> str:
    """The URL to connect to, for those who only read; UsageError if no engine ever ran here."""
    require_meta_store(data_dir)
    return _resolved(_recorded(data_dir) or _embedded(data_dir))


def claim_meta_store(data_dir: Path, given: str | None) -> str:
    """The URL to connect to, for an engine; the first one decides where the meta store is, for good."""
    check_owner(data_dir)
    recorded = _recorded(data_dir)
    if given is not None:
        _refuse_literal_password(given)
        if (recorded is not None and recorded != given) or (recorded is None and (data_dir / EMBEDDED).exists()):
            raise UsageError(
                "META_STORE_DIFFERS",
                "this data directory has its meta store elsewhere",
                detail=f"recorded: {recorded or EMBEDDED}",
                hint="leave --meta-store out, or choose another --data-dir",
            )
    url = _resolved(given or recorded or _embedded(data_dir))
    if given is not None and recorded is None:
        make_file(data_dir / URL_FILE)
        (data_dir / URL_FILE).write_text(given + "\n", encoding="utf-8")
    if url.startswith("sqlite"):
        make_file(data_dir / EMBEDDED)  # what SQLite puts beside it has its mode
    return url


def _embedded(data_dir: Path) -> str:
    return f"sqlite:///{data_dir.absolute() / EMBEDDED}"


def _recorded(data_dir: Path) -> str | None:
    file = data_dir / URL_FILE
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def _parsed(url: str) -> URL:
    from sqlalchemy import make_url  # late: every command looks here, and most need no more than whether there is one
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise UsageError(
            "META_STORE_URL",
            "the meta store's URL cannot be read",
            hint="postgresql://user:${PGPASSWORD}@host/database",
        ) from None


def _refuse_literal_password(url: str) -> None:
    parsed = _parsed(url)
    beside = any(is_secret_name(name) for name in parsed.query)  # it would not be resolved there
    if beside or (parsed.password and not is_reference(parsed.password)):
        raise UsageError(
            "LITERAL_SECRET",
            "the meta store's URL holds a password in clear",
            hint="put it into the environment and write postgresql://user:${NAME}@host/database",
        )


def _resolved(url: str) -> str:
    parsed = _parsed(url)
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.password:
        parsed = parsed.set(password=resolve_secret(parsed.password))
    return parsed.render_as_string(hide_password=False)
