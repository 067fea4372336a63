"""Notices that another engine has taken over (I9), whatever this one is busy with.

A commit notices it too, but only if there is one: a sink that hangs in Spark's tasks or in threads can keep every epoch
from its end. So the meta store is asked from a thread of its own, which needs neither the event loop nor its threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from headwater.errors import HeadwaterError
from headwater.storage.meta import MetaStore

LOOK_S: Final = 5.0


class OwnerWatch:
    """`fenced` is the error once there is a newer owner; `tell` is called with it, in the thread."""

    def __init__(self, meta: MetaStore, tell: Callable[[HeadwaterError], object], *, look_s: float = LOOK_S) -> None:
        self.fenced: HeadwaterError | None = None
        self._meta, self._tell, self._look_s = meta, tell, look_s
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="owner-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._look_s):
            try:
                self._meta.require_owner()
            except HeadwaterError as error:
                if error.code != "ENGINE_FENCED":  # the meta store is away: whoever needs it says so
                    continue
                self.fenced = error
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    self._tell(error)
                return
