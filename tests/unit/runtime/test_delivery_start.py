"""What must be there before the first sink's thread runs."""

from __future__ import annotations

import subprocess
import sys


def test_no_part_of_sqlalchemy_is_left_for_a_sinks_thread_to_load() -> None:
    text = "import sys; from headwater.runtime.delivery import Delivery; Delivery(None); "
    text += "before = {m for m in sys.modules if m.startswith('sqlalchemy.orm')}; import pyiceberg.catalog.sql; "
    text += "print(sorted({m for m in sys.modules if m.startswith('sqlalchemy.orm')} - before))"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
