"""A notebook as a person runs it: a real kernel, its outputs as Jupyter keeps them, an interrupt from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("SKYRL_TRAIN_NOTEBOOK_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="set SKYRL_TRAIN_NOTEBOOK_PYTHON: ./scripts/agent_env.sh notebook makes one"),
]

CLIENT = """
import json, os, signal, sys, threading, time, pathlib
import nbformat
from nbclient import NotebookClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

cells, interrupts = json.load(open("cells.json")), int(sys.argv[1])
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
manager = AsyncKernelManager()
manager._kernel_spec = KernelSpec(argv=[sys.argv[2], "-m", "ipykernel_launcher", "-f", "{connection_file}"], env={})
client = NotebookClient(book, timeout=500, km=manager, allow_errors=True, coalesce_streams=True)

def interrupt():
    for _ in range(4000):  # until the third step of the interrupted cell is recorded
        time.sleep(0.1)
        found = sorted(pathlib.Path().glob("long/metrics.jsonl"))
        if found and len(found[0].read_text().splitlines()) >= 3:
            os.kill(manager.provisioner.pid, signal.SIGINT)
            return

if interrupts:
    threading.Thread(target=interrupt, daemon=True).start()
client.execute()
json.dump([cell.outputs for cell in book.cells], open("outputs.json", "w"))
"""
SET_UP = """
from skyrl_train import load_config, train
rows = [{"prompt": f"{a}+{a}", "answer": 2 * a} for a in range(1, 9)]
small = {"environment.reward": lambda completion, answer: float(str(answer) in completion), "data.train": rows,
         "data.validation": rows[:2], "trainer.train_batch_size": 4, "trainer.policy_mini_batch_size": 4,
         "generator.n_samples_per_prompt": 2, "generator.sampling.max_generate_length": 8}
def of(steps, **more):
    return load_config("+experiment=gsm8k_multiturn", settings={**small, "trainer.total_steps": steps, **more})
"""


def outputs(tmp_path: Path, *cells: str, interrupts: bool = False) -> list[list[dict[str, Any]]]:
    """What each cell shows, as a notebook's file has it."""
    (tmp_path / "cells.json").write_text(json.dumps([SET_UP, *cells]))
    (tmp_path / "client.py").write_text(CLIENT)
    # The kernel is the environment of the notebook with the packages of this one.
    packages = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": packages, "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(
        [PYTHON, "client.py", str(int(interrupts)), PYTHON],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[dict[str, Any]]] = json.loads((tmp_path / "outputs.json").read_text())
    for cell in found:
        errors = [each for each in cell if each["output_type"] == "error"]
        assert errors == [], errors
    return found[1:]


def text_of(cell: list[dict[str, Any]]) -> str:
    return "".join(
        "".join(each["text"]) for each in cell if each["output_type"] == "stream" and each["name"] == "stdout"
    )


def test_steps_are_one_output_and_a_second_run_works(tmp_path: Path) -> None:
    first, second, asked = outputs(
        tmp_path,
        "result = train(of(12))\nresult",
        "again = train(of(2))",
        "print(len({tuple(each) for each in result.metrics}), result.metrics[0]['reward/mean'], again.step)",
    )
    displays = [each for each in first if each["output_type"] == "display_data"]
    assert len(displays) == 1
    assert displays[0]["data"]["text/plain"].startswith("step 12/12  reward ")
    assert "<svg" in displays[0]["data"]["text/html"]
    assert any("image/png" in each.get("data", {}) for each in first), "the result at the end of the cell is its curve"
    assert len(first) < 12
    assert [each["data"]["text/plain"][:8] for each in second if each["output_type"] == "display_data"] == ["step 2/2"]
    assert text_of(asked) == "1 None 2\n"


def test_an_interrupt_returns_what_there_is(tmp_path: Path) -> None:
    cell, asked = outputs(
        tmp_path,
        f"result = train(of(5000, output_dir={str(tmp_path / 'long')!r}))",
        "print(result.step >= 2, len(result.metrics) >= 3, result.stopped)",
        interrupts=True,
    )
    assert text_of(asked).startswith("True True stopped by SIGINT after step ")
    assert "goes on with it" in text_of(cell)
