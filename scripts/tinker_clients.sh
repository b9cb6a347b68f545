#!/bin/sh
# Makes an environment for each version of Tinker's SDK that skyrl-serve is tested with, apart from .venv: they have needs of
# their own, and stand for the clients' machines. `scripts/tinker_clients.sh FOLDER [VERSION ...]`; then
# `SKYRL_TRAIN_TINKER_CLIENTS=FOLDER python -m pytest tests/unit/serve/test_sdk.py`.
set -eu

[ $# -ge 1 ] || { echo "usage: $0 FOLDER [VERSION ...]" >&2; exit 2; }
folder=$1
shift
[ $# -ge 1 ] || set -- 0.24.1 0.25.0 0.38.0
mkdir -p "$folder"
for version in "$@"; do
    python=$folder/$version/bin/python
    "$python" -c "import tinker" >/dev/null 2>&1 && continue
    "${SKYRL_TRAIN_PYTHON:-python3}" -m venv "$folder/$version"
    "$python" -m pip install -qq --disable-pip-version-check "tinker==$version"
done
