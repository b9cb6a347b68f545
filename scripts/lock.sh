#!/bin/sh
# Writes requirements/gpu.lock and requirements/cpu.lock: every package that the images install, with version and hashes,
# from PyPI alone. Needs uv. To be run after a change of dependencies in pyproject.toml; what did not change stays.
#
# There is no uv.lock: uv resolves all extras for all supported Python versions at once, and vLLM has none for 3.10; and
# the CPU build of vLLM asks for torch's CPU build, which PyPI does not have. docker/Dockerfile.cpu takes that torch from
# PyTorch's own index, so that it is missing in cpu.lock; SKYRL_TRAIN_TORCH_CPU names a folder or an index that has it.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd -- "$root"
torch_cpu=${SKYRL_TRAIN_TORCH_CPU:-https://download.pytorch.org/whl/cpu/torch/}

lock() { # $1: gpu or cpu, $2: Python; further arguments go to uv
    name=$1 version=$2
    shift 2
    # Settings of this machine, such as mirrors and folders of wheels, must not reach the file.
    env -u UV_FIND_LINKS -u UV_INDEX -u UV_DEFAULT_INDEX -u UV_EXTRA_INDEX_URL UV_NO_CONFIG=1 \
        uv pip compile pyproject.toml --quiet --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
        --default-index https://pypi.org/simple --python-version "$version" --python-platform x86_64-manylinux_2_36 \
        --custom-compile-command scripts/lock.sh --output-file "requirements/$name.lock" "$@"
}

lock gpu 3.12 --extra vllm --extra view
lock cpu 3.11 --extra cpu --extra view --override requirements/cpu-overrides.txt --find-links "$torch_cpu" --no-emit-package torch
