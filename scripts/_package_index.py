"""Print, one `NAME=value` per line, what `scripts/_env.sh` exports before it installs packages.

- `UV_*` and `SSL_CERT_FILE`: pip's own configuration (files and `PIP_*` variables), which uv does not read.
- `TORCH_CPU_INDEX`: PyTorch's index of CPU builds, on a Linux machine without an NVIDIA driver, where PyPI's build
  would bring gigabytes of CUDA; only when that host answers within three seconds.

Variables that are set already win. Runs before anything is installed: standard library only, Python 3.10.
"""

import ast
import os
import shutil
import subprocess
import sys
import threading
import urllib.request

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 3.0
PIP_TIMEOUT_S = 60.0


def pip_config() -> dict[str, str]:
    """Return pip's options by their long name; a variable beats the section of a command, which beats `global`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    by_section: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines() if listed.returncode == 0 else []:
        key, _, quoted = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in by_section and quoted:
            by_section[section][option] = str(ast.literal_eval(quoted))
    return {option: value for options in by_section.values() for option, value in options.items()}


def uv_settings(pip: dict[str, str], torch_cpu_index: str) -> dict[str, str]:
    """Translate pip's options. pip takes the best version of all indexes, hence uv's `unsafe-best-match`."""
    indexes = [*pip.get("extra-index-url", "").split(), *([torch_cpu_index] if torch_cpu_index else [])]
    settings = {
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(indexes),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_INDEX": "1" if pip.get("no-index", "").lower() in {"1", "true", "yes", "on"} else "",
        "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", "").split()),
        "UV_HTTP_TIMEOUT": pip.get("timeout", ""),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "HTTP_PROXY": pip.get("proxy", ""),
        "HTTPS_PROXY": pip.get("proxy", ""),
    }
    return {name: value for name, value in settings.items() if value and not os.environ.get(name)}


def answers(url: str) -> bool:
    """Ask `url` for its head. In a thread, because looking up a host's name knows no timeout."""
    found: list[bool] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as response:
                found.append(response.status == 200)
        except OSError:
            found.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return bool(found and found[0])


def has_nvidia_driver() -> bool:
    """Whether `nvidia-smi` exists and runs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        return subprocess.run([command, "-L"], capture_output=True, timeout=PIP_TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def main() -> None:
    """Print the settings; say on stderr when the CPU build of torch may be out of reach."""
    pip = pip_config()
    torch_cpu_index = ""
    if sys.platform == "linux" and not has_nvidia_driver():
        if answers(f"{TORCH_CPU_INDEX}/torch/"):
            torch_cpu_index = TORCH_CPU_INDEX
        elif not {"find-links", "extra-index-url", "index-url"} & pip.keys():
            print(f"[skyrl_train] {TORCH_CPU_INDEX} does not answer: PyPI's torch brings CUDA, 4 GB", file=sys.stderr)
    settings = uv_settings(pip, torch_cpu_index)
    if torch_cpu_index:
        settings["TORCH_CPU_INDEX"] = torch_cpu_index
    for name, value in settings.items():
        print(f"{name}={value}")


if __name__ == "__main__":
    main()
