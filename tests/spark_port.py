"""A stranger at one of Spark's ports: one request in Spark's own framing, without the secret, by plain sockets.

    frame      length of all of it (8) · kind (1) · request id (8) · length of the body (4) · body
    body       OpenBlocks: kind 0 · application id · executor id · number of blocks, here none

A block manager that asks for no secret answers such a request with the handle of an (empty) stream of blocks.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import psutil

RPC_REQUEST: Final = 3
RPC_RESPONSE: Final = 4
_HEAD: Final = struct.Struct(">qbq")
LIMIT_S: Final = 5.0


def open_no_blocks() -> bytes:
    names = b"".join(struct.pack(">i", len(name)) + name for name in (b"app", b"1"))
    body = b"\0" + names + struct.pack(">i", 0)
    return _HEAD.pack(_HEAD.size + 4 + len(body), RPC_REQUEST, 7) + struct.pack(">i", len(body)) + body


def is_served(port: int) -> bool:
    """Whether somebody who knows no secret is answered with more than a refusal."""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as peer:
        peer.sendall(open_no_blocks())
        try:
            answer = peer.recv(_HEAD.size, socket.MSG_WAITALL)
        except (TimeoutError, ConnectionError):
            return False
    return len(answer) == _HEAD.size and _HEAD.unpack(answer)[1] == RPC_RESPONSE


def listening(pid: int) -> set[int]:
    """The ports at which a process listens."""
    found = psutil.Process(pid).net_connections("tcp")
    return {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
