"""The documented commands that install vLLM's CPU build, each in an empty environment, and whether vLLM then generates.

    python tests/reliability/vllm_from_nothing.py uv pip

Takes the commands from docs/vllm.md, runs them in a copy of the repository with a HOME of its own and no variable
but those that say where packages come from, and has the bundled model generate. Prints seconds, size and tokens.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800.0
_PACKAGES = ("PIP_", "UV_", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy")
GENERATE = """
import vllm
from skyrl_train.config.schema import Config
from skyrl_train.inference.vllm.engine import VLLMEngine
from skyrl_train.runs.construction import engine_settings
from skyrl_train.types import GenerationRequest, SamplingParams
engine = VLLMEngine(engine_settings(Config()))
request = GenerationRequest(
    request_id="a", prompt_token_ids=tuple(range(5, 40)), sampling=SamplingParams(max_generate_length=8), seed=1
)
print("tokens:", vllm.__version__, engine.submit(request).result(120).token_ids)
engine.close()
"""


def documented(installer: str) -> str:
    """The command of docs/vllm.md that begins with the installer's name."""
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8").partition("## vLLM without a GPU")[2]
    block = re.search(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    assert block is not None
    (command,) = [line for line in block[1].splitlines() if line.startswith(f"{installer} ")]
    return command


def settings(installer: str) -> dict[str, str]:
    """Where packages come from, as this machine has it; for uv, pip's configuration in uv's words."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_PACKAGES)}
    if installer == "uv":
        script = [_base_python(), str(ROOT / "scripts" / "_package_index.py")]
        lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
        kept |= dict(line.split("=", 1) for line in lines)
    return kept


def try_installer(installer: str, scratch: Path) -> bool:
    """Whether the command works and vLLM then generates."""
    clone, venv, home = scratch / "clone", scratch / "venv", scratch / "home"
    home.mkdir()
    clone.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(
        ["tar", "--null", "--files-from=-", "-cf", "-"], cwd=ROOT, input=listed, capture_output=True
    )
    subprocess.run(["tar", "-xf", "-"], cwd=clone, input=packed.stdout, check=True)
    programs = [str(venv / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
    if installer == "uv":
        found = shutil.which("uv")
        if found is None:
            print("uv: not on the PATH")
            return False
        programs.append(str(Path(found).parent))
    environment = {
        **settings(installer),
        "HOME": str(home),
        "PATH": os.pathsep.join(programs),
        "VIRTUAL_ENV": str(venv),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([_base_python(), "-m", "venv", str(venv)], env=environment, check=True)
    started = time.monotonic()
    for command in (["sh", "-c", documented(installer)], [str(venv / "bin" / "python"), "-c", GENERATE]):
        ran = subprocess.run(
            command,
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if ran.returncode:
            print(f"{installer}: failed: {command}\n{ran.stdout[-4000:]}")
            return False
        if command[0] == "sh":
            seconds = time.monotonic() - started
    size = sum(path.lstat().st_size for path in venv.rglob("*")) / 1e9
    tokens = next(line for line in ran.stdout.splitlines() if line.startswith("tokens:"))
    print(f"{installer}: installed in {seconds:.0f} s, {size:.1f} GB; {tokens}", flush=True)
    return True


def _base_python() -> str:
    """The interpreter that this environment was made of."""
    return str(Path(sys.base_prefix) / "bin" / "python3")


def main() -> int:
    good = True
    for installer in sys.argv[1:] or ("uv", "pip"):
        with tempfile.TemporaryDirectory(prefix="vllm-from-nothing-") as scratch:
            good = try_installer(installer, Path(scratch)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
