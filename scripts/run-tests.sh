#!/usr/bin/env bash
# Runs the test phases (folders of tests/), a few processes at a time, all of them even if one fails, and sums up.
# Where tests start engines or servers, a process takes one file, or several that gain by sharing it (GROUPS_OF_FILES).
# A process's output is printed in one piece when it ends.
#
# HEADWATER_SLOW_TESTS=1 includes tests marked slow. HEADWATER_TEST_JOBS is how many processes run at once (default 2:
# an engine under test mostly waits for barriers, servers or the start of a JVM). PYTEST_ADDOPTS reaches pytest as usual.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VENV=${VENV:-.venv}
# A JVM that lives for a minute spends half of its time on optimising code that it then hardly uses.
export HEADWATER_JAVA_OPTIONS=${HEADWATER_JAVA_OPTIONS:--XX:TieredStopAtLevel=1}
export DUMP_AFTER_S=300 # a test that takes longer prints where every thread stands
if [[ -n ${HEADWATER_SLOW_TESTS:-} ]]; then
  export LIMIT_S=7200 SELECT=""
else
  export LIMIT_S=1200 SELECT="not slow" # a hanging process must end before CI's own limit, so that its output is seen
fi
# A server of the whole session, or one Spark session, is started once for all of a group. Files whose tests run an engine
# with a source in their own process stay alone: Spark's workers read secrets from the environment that the JVM began with.
GROUPS_OF_FILES=(
  "tests/integration/test_postgres_*.py tests/integration/test_servers.py tests/contract/test_meta_store.py"
  "tests/spark/test_view_*.py tests/spark/test_parquet_files.py tests/spark/test_sink_rows.py"
)
# Contracts that name seconds (SIGTERM ends within 10 s) are tried first, by themselves.
ALONE=" tests/integration/test_engine_cli.py "
RESULTS=$(mktemp -d)
export RESULTS
trap 'rm -rf "$RESULTS"' EXIT

run_one() {
  local target=$1 begin=$SECONDS code result
  local name=${target//[\/ *]/.} plugins=()
  # Hypothesis is loaded by its plugin's summary, after the last test, even where nothing used it.
  [[ $target =~ ^tests/(unit|property) ]] || plugins=(-p no:hypothesispytest)
  # shellcheck disable=SC2086 # a target may be several patterns
  timeout --foreground --kill-after=30 "$LIMIT_S" "$VENV/bin/python" -m pytest "${plugins[@]}" $target \
    -m "$SELECT" --durations=5 --durations-min=5 -o faulthandler_timeout="$DUMP_AFTER_S" >"$RESULTS/$name.log" 2>&1
  code=$?
  case $code in
    0) result=passed ;;
    5) result="no tests" ;; # all of them are slow ones
    124 | 137) result="timed out after $LIMIT_S s" ;;
    *) result="failed (pytest exit code $code)" ;;
  esac
  printf '%5d s  %-70s  %s\n' $((SECONDS - begin)) "$target" "$result" >"$RESULTS/$name.summary"
  [[ $result == passed || $result == "no tests" ]] || tail -n 12 "$RESULTS/$name.log" >"$RESULTS/$name.failed"
  (
    flock 9
    printf '\n== %s\n' "$target"
    cat "$RESULTS/$name.log"
    tail -n 1 "$RESULTS/$name.summary"
  ) 9>"$RESULTS/lock"
}
export -f run_one

targets=()
alone=()
declare -A grouped=()
add_group_of() {
  local file=$1 group
  [[ -n ${grouped[$file]:-} ]] && return
  for group in "${GROUPS_OF_FILES[@]}"; do
    # shellcheck disable=SC2206,SC2086 # the patterns are meant to be expanded
    local files=($group)
    if [[ " ${files[*]} " == *" $file "* ]]; then
      for file in "${files[@]}"; do grouped[$file]=1; done
      targets+=("$group")
      return
    fi
  done
  if [[ $ALONE == *" $file "* ]]; then alone+=("$file"); else targets+=("$file"); fi
}
for phase in "$@"; do
  [[ -d tests/$phase ]] || continue
  case $phase in
    contract | spark | integration | resumption)
      for file in "tests/$phase"/test_*.py; do add_group_of "$file"; done
      ;;
    *) targets+=("tests/$phase") ;;
  esac
done
for file in "${alone[@]}"; do run_one "$file"; done
printf '%s\n' "${targets[@]}" | xargs -P "${HEADWATER_TEST_JOBS:-2}" -I{} bash -c 'run_one "{}"'

printf '\n== summary (%d s)\n' "$SECONDS"
cat "$RESULTS"/*.summary
for failed in "$RESULTS"/*.failed; do # once more at the very end: the end is what is seen of a long output
  [[ -e $failed ]] && cat "$failed"
done
! grep -qvE '  (passed|no tests)$' "$RESULTS"/*.summary
