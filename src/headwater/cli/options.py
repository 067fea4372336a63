"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

DataDir = Annotated[
    Path,
    typer.Option("--data-dir", envvar="HEADWATER_DATA_DIR", help="where everything is kept", show_default=True),
]
DEFAULT_DIR: Final = Path("headwater-data")
