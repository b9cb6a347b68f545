#!/bin/sh
# Starts a command of the project in a container: `skyrl-NAME ...` as it stands, anything else as arguments of skyrl-train.
# Where the image computes on GPUs, the host's NVIDIA driver is checked first, since an older one fails in the middle of
# the start with an error of CUDA that does not name it.
set -eu
needed=580

say() { printf '[skyrl_train] %s\n' "$*" >&2; }

# The base image sets CUDA_VERSION; an image for CPUs has none.
if [ -n "${CUDA_VERSION:-}" ]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=
    major=${driver%%.*}
    case $major in
    '' | *[!0-9]*)
        say "no NVIDIA driver answers in this container: start it with \`docker run --gpus all\` (the host needs the NVIDIA" \
            "container toolkit and a driver of version $needed or newer), or compute on the CPU with platform=cpu"
        ;;
    *)
        # Cards of data centres compute with an older driver by the libraries of CUDA's forward compatibility, which the base
        # image has; whether they do here is asked of them.
        compat=${CUDA_HOME:-/usr/local/cuda}/compat
        if [ "$major" -lt "$needed" ] && LD_LIBRARY_PATH="$compat:${LD_LIBRARY_PATH:-}" python3 -c \
            'import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).cuInit(0))' "$compat/libcuda.so.1" 2>/dev/null; then
            export LD_LIBRARY_PATH="$compat:${LD_LIBRARY_PATH:-}"
            say "the host's NVIDIA driver $driver computes by CUDA's forward compatibility ($compat)"
        elif [ "$major" -lt "$needed" ]; then
            say "error: the host's NVIDIA driver is $driver; torch and vLLM in this image are built for CUDA 13, which needs" \
                "$needed or newer. Update the driver of the host, or compute on the CPU with \`--entrypoint skyrl-train\`" \
                "and platform=cpu"
            exit 1
        fi
        ;;
    esac
fi

case ${1:-} in
skyrl-* | python | python3 | sh | bash) exec "$@" ;;
*) exec skyrl-train "$@" ;;
esac
