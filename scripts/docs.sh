#!/bin/sh
# Builds the documentation site, strictly: a broken link fails. ./scripts/docs.sh [VERSION], by default "latest"; the pages
# are then under build/site/VERSION, beside the versions that are there already. To read them:
# python -m http.server --directory build/site
# The generator lies in an environment of its own, build/docs-venv, and needs nothing of what the project needs.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
version=${1:-latest}
tools=${SKYRL_TRAIN_DOCS_VENV:-$root/build/docs-venv}
if ! "$tools/bin/python" -c 'import zensical, mkdocstrings_handlers.python' >/dev/null 2>&1; then
    find_base_python
    say "installing the site's generator into $tools"
    "$base_python" -m venv "$tools" || die "$base_python could not create $tools"
    # The extra alone, without the project.
    sed -n 's/^docs = \[\([^]]*\)\].*/\1/p' pyproject.toml | grep -o '"[^"]*"' |
        xargs "$tools/bin/python" -m pip install -qq --disable-pip-version-check ||
        die "the generator could not be installed: the reason is above"
    [ -x "$tools/bin/zensical" ] || die "the generator needs Python 3.11 or later: SKYRL_TRAIN_PYTHON=/path/to/python3.11"
fi
"$tools/bin/python" scripts/make_site_pages.py build/docs
"$tools/bin/zensical" build --clean --strict
[ "$version" = latest ] || {
    rm -rf -- "build/site/$version"
    mv build/site/latest "build/site/$version"
}
"$tools/bin/python" scripts/make_site_pages.py --versions build/site "$version"
say "built build/site/$version"
