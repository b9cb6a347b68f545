"""Launch scripts, manifests, images and placement presets: parsed, dry-run with stand-ins, and composed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from skyrl_train.cli import register_resolvers
from skyrl_train.config.load import load_config
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate_config

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCH = REPOSITORY / "scripts" / "launch"


def composed(*overrides: str) -> Config:
    register_resolvers()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return load_config(compose("config", overrides=[*overrides, "output_dir=/outputs"]))


def overrides_of(command: str) -> list[str]:
    """What a launcher hands to the command line, without paths and addresses that it finds out."""
    found = re.findall(r"(?<!\S)(\+?[a-z_.]+=[\w.]+)(?!\S)", command.replace("\\\n", " "))
    return [text for text in found if not text.startswith("hydra.")]


@pytest.mark.parametrize("name", ["node.sh", "setup.sh", "slurm.sbatch"])
def test_a_launch_script_is_valid_shell(name: str) -> None:
    shell = "bash" if name.endswith("sbatch") else "sh"
    assert subprocess.run([shell, "-n", str(LAUNCH / name)], check=False).returncode == 0


@pytest.mark.parametrize("name", ["cpu_2", "gpu_1", "gpu_8_colocated", "gpu_8_split", "gpu_2x8"])
def test_a_placement_preset_is_a_valid_configuration(name: str) -> None:
    config = composed("+experiment=gsm8k_multiturn", f"placement={name}", "strategy=fsdp2", "generator=vllm")
    assert validate_config(config) == []


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
        assert "placement=gpu_2x8" in overrides
        assert validate_config(composed(*overrides)) == []


def test_kuberay_runs_as_nobody_in_particular_with_as_many_gpus_as_the_placement_wants() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    cluster: dict[str, Any] = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], *(g["template"]["spec"] for g in cluster["workerGroupSpecs"])]
    gpus = sum(int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods)
    placement, vllm = composed("placement=gpu_2x8", "strategy=fsdp2").placement, 8
    assert gpus == placement.policy_num_workers + vllm
    assert all(pod["securityContext"]["runAsNonRoot"] for pod in pods)


def test_slurm_brings_ray_up_trains_and_takes_it_down(tmp_path: Path) -> None:
    root, tools, calls = tmp_path / "clone", tmp_path / "bin", tmp_path / "calls"
    (root / ".venv" / "bin").mkdir(parents=True)
    tools.mkdir()
    say = f'#!/bin/sh\necho "$(basename "$0") $*" >>"{calls}"\n'
    programs = {
        tools / "scontrol": "echo node-a; echo node-b",
        tools / "srun": 'case "$*" in *hostname*) echo 10.0.0.1;; esac',
        root / ".venv/bin/ray": "",
        root / ".venv/bin/python": "exit 3",
    }
    for path, body in programs.items():
        path.write_text(say + body + "\n", encoding="utf-8")
        path.chmod(0o755)
    variables = {
        "SLURM_SUBMIT_DIR": str(root),
        "SLURM_JOB_NODELIST": "n",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
    }
    result = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "seed=5"],
        env={**variables, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_GPUS_ON_NODE": "8"},
        check=False,
        timeout=60,
    )
    said = calls.read_text(encoding="utf-8").splitlines()
    trained = next(line for line in said if line.startswith("python"))
    assert result.returncode == 3
    assert "placement.ray_address=10.0.0.1:6379" in trained
    assert trained.endswith("seed=5")
    assert "ray stop --force" in said[-1]
    assert any("ray start --head" in line for line in said)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_is_pinned_not_root_and_the_command_line(name: str) -> None:
    lines = (REPOSITORY / "docker" / name).read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(
        r"FROM [\w./-]+:[\w.-]*\d+\.\d+\.\d+[\w.-]*", next(line for line in lines if line.startswith("FROM"))
    )
    assert [line for line in lines if line.startswith("USER")] == ["USER skyrl"]
    assert 'ENTRYPOINT ["skyrl-train"]' in lines


def test_the_cpu_image_keeps_out_what_vllm_does_not_load_beside() -> None:
    kept_out = {
        line.split(";")[0].strip()
        for line in (REPOSITORY / "requirements/cpu-overrides.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    text = (REPOSITORY / "docker/Dockerfile.cpu").read_text(encoding="utf-8")
    assert kept_out == {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert all(name in text.partition("uninstall")[2] for name in kept_out)
