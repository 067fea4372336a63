"""Options that commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from headwater.storage.location import data_directory

DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        envvar="HEADWATER_DATA_DIR",
        help="where everything is kept",
        show_default=True,
        parser=data_directory,
        metavar="PATH",
    ),
]
DEFAULT_DIR: Final = Path("headwater-data")
SparkConf = Annotated[
    list[str] | None,
    typer.Option(
        "--spark-conf", help="setting of Spark name=value; HEADWATER_SPARK_CONF has others, with blanks between"
    ),
]


def spark_settings(pairs: list[str] | None) -> dict[str, str]:
    """Those of the environment, and over them those of the command line."""
    from headwater.spark.options import VARIABLE, parse_settings

    return parse_settings([*os.environ.get(VARIABLE, "").split(), *(pairs or ())])
