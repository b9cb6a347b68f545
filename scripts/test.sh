#!/bin/sh
# Runs the tests: the default suite; with --slow, or where CI=true, the slow ones after it.
# Other arguments go to pytest: ./scripts/test.sh tests/unit -k resume
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"

slow=false
[ "${CI:-}" != true ] || slow=true
remaining=$#
while [ "$remaining" -gt 0 ]; do
    argument=$1
    shift
    remaining=$((remaining - 1))
    if [ "$argument" = --slow ]; then slow=true; else set -- "$@" "$argument"; fi
done

ensure_env dev
# More threads than free cores make torch spin: on small models one is fastest.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

status=0
"$python" -m pytest "$@" || status=$?
if [ "$slow" = true ]; then
    slow_status=0
    "$python" -m pytest -m 'slow and not cluster and not gpu' "$@" || slow_status=$?
    # 5: nothing collected, which is fine here: the chosen files need not hold a slow test.
    [ "$status" -ne 0 ] || [ "$slow_status" -eq 5 ] || status=$slow_status
fi
exit "$status"
