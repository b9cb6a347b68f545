#!/bin/sh
# The environment and the data of a GPU node, for launchers that prepare nodes one by one.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
# torch and vLLM are built for CUDA 13; a stock image of a cloud may have an older driver, which fails in the middle of a start.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=
case ${driver%%.*} in
'' | *[!0-9]*) die "no NVIDIA driver answers on this node (nvidia-smi): it needs version 580 or newer" ;;
*) [ "${driver%%.*}" -ge 580 ] ||
    die "the NVIDIA driver of this node is $driver, and CUDA 13 needs 580 or newer: choose a newer image (SkyPilot: resources.image_id)" ;;
esac
ensure_env vllm
ensure_gsm8k
