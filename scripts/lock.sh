#!/bin/sh
# Writes uv.lock, requirements/gpu.lock and requirements/cpu.lock, with versions and hashes, from PyPI alone. Needs uv. To be
# run after a change of dependencies in pyproject.toml; what did not change stays.
#
# uv.lock has all extras for all supported versions of Python, each other lock what an image installs. The CPU build of vLLM
# asks for torch's CPU build, which PyPI does not have. uv.lock has PyPI's build in its place. docker/Dockerfile.cpu takes the
# other from PyTorch's own index, so that it is missing in cpu.lock; SKYRL_TRAIN_TORCH_CPU names a folder or an index with it.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd -- "$root"
torch_cpu=${SKYRL_TRAIN_TORCH_CPU:-https://download.pytorch.org/whl/cpu/torch/}

# Settings of this machine, such as mirrors and folders of wheels, must not reach the files.
alone() {
    env -u UV_FIND_LINKS -u UV_INDEX -u UV_DEFAULT_INDEX -u UV_EXTRA_INDEX_URL UV_NO_CONFIG=1 \
        uv "$@" --quiet --default-index https://pypi.org/simple
}

lock() { # $1: gpu or cpu, $2: Python; further arguments go to uv
    name=$1 version=$2
    shift 2
    alone pip compile pyproject.toml --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
        --python-version "$version" --python-platform x86_64-manylinux_2_36 \
        --custom-compile-command scripts/lock.sh --output-file "requirements/$name.lock" "$@"
}

alone lock
images="--extra hub --extra gym --extra plots --extra http --extra remote --extra jsonschema --extra view --extra lora --extra tensorboard"
# shellcheck disable=SC2086
lock gpu 3.12 --extra vllm $images
# shellcheck disable=SC2086
lock cpu 3.11 --extra cpu $images --override requirements/cpu-overrides.txt --find-links "$torch_cpu" --no-emit-package torch
