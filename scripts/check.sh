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

# Names, attributes and arguments alone, where most of what there is runs on machines of another kind: with a GPU, in a
# benchmark, on Ray.
check_names() {
    "$python" -m mypy --cache-dir .mypy_cache/names --explicit-package-bases --ignore-missing-imports --implicit-reexport --allow-untyped-calls --allow-untyped-defs \
        --no-warn-unused-ignores --no-warn-unreachable --disable-error-code=arg-type --disable-error-code=assignment \
        --disable-error-code=call-overload --disable-error-code=index --disable-error-code=misc --disable-error-code=list-item \
        --disable-error-code=no-any-return --disable-error-code=type-arg --disable-error-code=union-attr \
        --disable-error-code=var-annotated --disable-error-code=return-value --disable-error-code=operator \
        --disable-error-code=override --disable-error-code=dict-item --disable-error-code=no-untyped-call \
        tests/gpu tests/cluster tests/reliability scripts
}

check() {
    case $1 in
    format) "$python" -m ruff format --check . ;;
    lint) "$python" -m ruff check . ;;
    types) "$python" -m mypy && check_names ;;
    layers) "$python" -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())' ;;
    esac
}

failed=
for piece; do
    say "$piece"
    check "$piece" || failed="$failed $piece"
done
[ -z "$failed" ] || die "failed:$failed"
