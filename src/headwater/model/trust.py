"""Who a statement comes from, and so what it may do (DESIGN: Trust).

The origin is decided where the statement enters (the process of the owner, or a token of the endpoint) and travels with
it; what each may do is decided by those who carry statements out.
"""

from __future__ import annotations

from enum import StrEnum


class Trust(StrEnum):
    """From the most to the least."""

    OWNER = "owner"  # `run FILE`, the Python API, a command that starts its own engine: may run code and read files
    ADMIN = "admin"  # the endpoint's admin token: every statement, but no code and no files of the machine
    READ = "read"  # the endpoint's read token: queries, /status, /metrics and the page
