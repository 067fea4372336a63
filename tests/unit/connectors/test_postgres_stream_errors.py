"""What an end of the stream means: some ends come again at the same place and need a new slot, others pass."""

from __future__ import annotations

from typing import Any, cast

import pytest
from psycopg import pq

from headwater.connectors.postgres.replication import result_error
from headwater.errors import SourceError, TransientError


class Answer:
    """An error of the server's, as libpq has it."""

    def __init__(self, state: str, message: str) -> None:
        self.fields = {pq.DiagnosticField.SQLSTATE: state, pq.DiagnosticField.MESSAGE_PRIMARY: message}

    def error_field(self, field: pq.DiagnosticField) -> bytes:
        return self.fields[field].encode()


@pytest.mark.parametrize(
    ("state", "message", "code", "kind"),
    [
        ("XX000", 'could not map filenode "base/5/1" to relation OID', "SOURCE_SLOT_UNREADABLE", SourceError),
        ("XX000", 'could not map filenumber "base/5/1" to relation OID', "SOURCE_SLOT_UNREADABLE", SourceError),
        ("42704", 'replication slot "s" does not exist', "SOURCE_SLOT_LOST", SourceError),
        ("XX000", "something else inside the server", "SOURCE_FAILED", TransientError),
        ("57P01", "terminating connection", "SOURCE_UNREACHABLE", TransientError),
    ],
)
def test_stream_that_would_end_at_the_same_place_again_needs_a_new_slot(
    state: str, message: str, code: str, kind: type
) -> None:
    error = result_error(cast(Any, Answer(state, message)), cast(Any, None))
    assert (error.code, type(error)) == (code, kind)
