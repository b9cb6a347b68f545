#!/bin/sh
# Format, lint, types and layers; changes nothing. All four, or those named: ./scripts/check.sh types layers
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"

[ $# -gt 0 ] || set -- format lint types layers
for piece; do
    case $piece in
    format | lint | types | layers) ;;
    *) die "unknown check '$piece': choose from format, lint, types, layers" ;;
    esac
done
ensure_env dev

check() {
    case $1 in
    format) "$python" -m ruff format --check . ;;
    lint) "$python" -m ruff check . ;;
    types) "$python" -m mypy ;;
    layers) "$python" -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())' ;;
    esac
}

failed=
for piece; do
    say "$piece"
    check "$piece" || failed="$failed $piece"
done
[ -z "$failed" ] || die "failed:$failed"
