#!/bin/sh
# Makes an environment for one version of Tinker's SDK, and prints its interpreter:
#   "$(./scripts/client_env.sh)" -m pytest tests/conformance
#   "$(./scripts/client_env.sh 0.24.1)" -m pytest tests/conformance
#   "$(./scripts/client_env.sh cookbook)" -m tinker_cookbook.recipes.math_rl.train ...
# The last has tinker-cookbook, without the renderers that only images and audio need. An environment is kept in
# .venv-clients/VERSION (or $SKYRL_TRAIN_CLIENT_ENVS/VERSION) until what is installed there changes, and has none of this
# repository's packages: the SDK's own differ from them.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"

version=${1:-0.38.0} alone=
case $version in
cookbook)
    packages="tinker==0.38.0 pytest>=9,<10 zstandard torch>=2.10,<2.14 transformers>=5.12,<6 datasets chz>=0.4 blobfile cloudpickle"
    packages="$packages pyrage termcolor tiktoken rich pillow aiohttp sympy pylatexenc math-verify antlr4-python3-runtime==4.13.2"
    alone=tinker-cookbook==0.6.1
    ;;
[0-9]*.[0-9]*.[0-9]*)
    packages="tinker==$version pytest>=9,<10"
    [ "$(printf '%s\n' 0.25.0 "$version" | sort -V | head -n 1)" = 0.25.0 ] || packages="$packages zstandard"
    ;;
*) die "usage: $0 [VERSION|cookbook], such as 0.24.1, 0.25.0 or 0.38.0" ;;
esac
into() { # arguments: packages
    if has_uv; then
        uv pip install --quiet --python "$python" "$@"
    else
        [ -z "${TORCH_CPU_INDEX:-}" ] || set -- --extra-index-url "$TORCH_CPU_INDEX" "$@"
        PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install -q "$@"
    fi
}

venv=${SKYRL_TRAIN_CLIENT_ENVS:-$root/.venv-clients}/$version
python=$venv/bin/python
stamp=$venv/.installed-packages
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$packages${alone:+ $alone}" ] || ! python_fits "$python"; then
    find_base_python
    "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "the SDK needs Python 3.11, and $base_python is older: name another by SKYRL_TRAIN_PYTHON"
    read_package_index
    rm -rf -- "$venv"
    mkdir -p -- "$(dirname -- "$venv")"
    say "installing $packages into $venv"
    if has_uv; then
        uv venv --quiet --python "$base_python" "$venv"
    else
        "$base_python" -m venv "$venv"
    fi >&2 || die "$base_python could not create $venv"
    # shellcheck disable=SC2086
    { into $packages && { [ -z "$alone" ] || into --no-deps "$alone"; }; } >&2 ||
        die "the packages could not be installed: the reason is above"
    printf '%s\n' "$packages${alone:+ $alone}" >"$stamp"
fi
printf '%s\n' "$python"
