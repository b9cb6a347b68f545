#!/bin/sh
# Makes an environment for an example of docs/agents.md, or for tests of notebooks, and prints its interpreter:
#   PYTHONPATH=examples python -m agent_mini_swe --python "$(./scripts/agent_env.sh mini_swe)"
#   SKYRL_TRAIN_NOTEBOOK_PYTHON="$(./scripts/agent_env.sh notebook)" ./scripts/test.sh --slow -k notebook
# It is kept in .venv-agents/NAME (or $SKYRL_TRAIN_AGENT_ENVS/NAME) until what is installed there changes. It has none of
# this repository's packages: the agents are programs of their own.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"

case ${1:-} in
graph) packages='langgraph==1.2.* langchain==1.4.* langchain-openai==1.7.*' ;;
mini_swe) packages='mini-swe-agent==2.4.* mcp' ;;
notebook) packages='nbclient==0.11.* ipykernel>=6,<8' ;;
*) die "usage: $0 graph|mini_swe|notebook" ;;
esac
venv=${SKYRL_TRAIN_AGENT_ENVS:-$root/.venv-agents}/$1
python=$venv/bin/python
stamp=$venv/.installed-packages
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$packages" ] || ! python_fits "$python"; then
    find_base_python
    read_package_index
    rm -rf -- "$venv"
    mkdir -p -- "$(dirname -- "$venv")"
    say "installing $packages into $venv"
    # shellcheck disable=SC2086
    if has_uv; then
        uv venv --quiet --python "$base_python" "$venv" && uv pip install --quiet --python "$python" $packages
    else
        "$base_python" -m venv "$venv" &&
            PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install -q $packages
    fi >&2 || die "the packages could not be installed: the reason is above"
    printf '%s\n' "$packages" >"$stamp"
fi
printf '%s\n' "$python"
