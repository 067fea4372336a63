"""The schema registry's HTTP interface (Confluent's), as far as a producer needs it: register a schema, get its id."""

from __future__ import annotations

import httpx

from headwater.errors import DefiniteError, TransientError
from headwater.sink.options import SinkOptions

TIMEOUT_S = 10.0


def register(options: SinkOptions, subject: str, schema: str) -> int:
    """The id of `schema` under `subject`; registering what is there already gives the same id again."""
    url = f"{(options.reveal('schema.registry.url') or '').rstrip('/')}/subjects/{subject}/versions"
    user = options["schema.registry.username"]
    login = (str(user), options.reveal("schema.registry.password") or "") if user else None
    try:
        answer = httpx.post(url, json={"schema": schema}, auth=login, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TransientError(
            "SINK_UNREACHABLE", "the schema registry does not answer", detail=type(error).__name__
        ) from None
    if answer.status_code == 409:
        raise DefiniteError(
            "SINK_TARGET_MISMATCH",
            f"the schema registry refuses the schema of subject {subject} as incompatible",
            hint="use another topic, or change the subject's compatibility",
        )
    if answer.status_code >= 500 or answer.status_code == 429:
        raise TransientError("SINK_UNREACHABLE", "the schema registry fails", detail=f"status {answer.status_code}")
    if answer.status_code >= 400:
        raise DefiniteError(
            "SINK_OPTION_INVALID",
            f"the schema registry refuses subject {subject}",
            detail=f"status {answer.status_code}",
            hint="check schema.registry.url, the user and the password",
        )
    return int(answer.json()["id"])
