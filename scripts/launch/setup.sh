#!/bin/sh
# The environment and the data of a GPU node, for launchers that prepare nodes one by one.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd -P)
# shellcheck source=scripts/_env.sh
. "$root/scripts/_env.sh"
cd -- "$root"
ensure_env vllm
ensure_gsm8k
