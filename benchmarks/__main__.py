"""`python -m benchmarks`: run benchmarks by name and print their figures as one Markdown table.

Progress goes to stderr, the table to stdout (or also to `--out`), so that the README's table can be pasted from it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Benchmark, Figure, Scale, short

MODULES = ("engine", "postgres", "views", "sinks")


def found() -> dict[str, Benchmark]:
    """All benchmarks as `module.name`."""
    return {
        f"{module}.{name}": run
        for module in MODULES
        if (Path(__file__).parent / f"{module}.py").exists()
        for name, run in importlib.import_module(f"benchmarks.{module}").BENCHMARKS.items()
    }


def line(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} ×"
    met = {None: "", True: " ✓", False: " ✗"}[figure.met]
    value = f"{short(figure.value)} {figure.unit}".strip()
    return f"| {figure.name} | {value} | {figure.reference} | {ratio} | {figure.goal}{met} |"


def table(figures: list[Figure]) -> str:
    head = ["| figure | value | reference in the same run | ratio | goal |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(line, figures)])


def machine() -> str:
    import pyspark

    versions = f"Python {platform.python_version()}, Spark {pyspark.__version__}"
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="module or module.name; all of them if none is given")
    parser.add_argument("--list", action="store_true", help="show what there is")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size (0.01 for a smoke run)")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    args = parser.parse_args()
    all_of_them = found()
    if args.list:
        print("\n".join(all_of_them))
        return 0
    wanted = [n for n in all_of_them if not args.names or n in args.names or n.split(".")[0] in args.names]
    unknown = [n for n in args.names if n not in all_of_them and not any(w.startswith(f"{n}.") for w in all_of_them)]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; --list shows them")
    figures: list[Figure] = []
    failed = []
    for name in wanted:
        begin = time.monotonic()
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
            try:
                for figure in all_of_them[name](Scale(args.scale, Path(folder))):
                    figures.append(figure)
                    print(line(figure), file=sys.stderr, flush=True)
            except Exception as error:  # the others' figures are still worth having
                failed.append(name)
                print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    text = f"{table(figures)}\n\n{machine()}, scale {args.scale:g}"
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
