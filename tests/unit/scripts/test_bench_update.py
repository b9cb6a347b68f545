"""What `scripts/bench/update.py` calls a difference, and what it does about a process that takes too much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))

from update_checks import MeasurementError, compare_gradients, run_within
from update_work import build_model, size_of

from tests.support.learner_cases import save_tiny_model


def gradients(folder: Path, **distances: float) -> dict[str, Path]:
    """Of one parameter of length 1, so far from one another as told."""
    files = {name: folder / f"{name}.pt" for name in distances}
    for name, distance in distances.items():
        torch.save({"weight": torch.tensor([1.0, distance], dtype=torch.float64)}, files[name])
    return files


def test_a_gradient_may_be_three_times_as_far_as_the_nearest_peers_of_two_makers_are(tmp_path: Path) -> None:
    files = gradients(tmp_path, auto=4.5e-5, trl=0.0, openrlhf=2e-5, verl=9e-4, packed=9e-5)
    distances, differing = compare_gradients(files, "float32")
    assert distances["auto"] == 0.0
    assert distances["trl"] == pytest.approx(4.5e-5)
    assert differing == {"verl", "packed"}, "a peer that is alone with its gradient, too"


def test_two_forms_of_one_peer_say_nothing_of_what_rounding_does(tmp_path: Path) -> None:
    files = gradients(tmp_path, auto=3e-5, trl=0.0, trl_merged=2e-5)
    assert compare_gradients(files, "float32")[1] == {"auto", "trl_merged"}


def test_a_gradient_that_is_no_number_differs_and_bounds_nothing(tmp_path: Path) -> None:
    files = gradients(tmp_path, auto=0.0, trl=5e-6, verl=float("nan"))
    assert compare_gradients(files, "float32")[1] == {"verl"}


def test_a_process_that_takes_too_much_memory_or_time_is_ended() -> None:
    takes = [sys.executable, "-c", "import time; held = bytearray(10**8); time.sleep(60)"]
    with pytest.raises(MeasurementError, match=r"over 0\.1 GB"):
        run_within(takes, {}, memory_gb=0.1, timeout_s=50.0)
    with pytest.raises(MeasurementError, match="over 0 s"):
        run_within(takes, {}, memory_gb=10.0, timeout_s=0.1)
    code, printed, _ = run_within([sys.executable, "-c", "print(7)"], {}, memory_gb=1.0, timeout_s=50.0)
    assert (code, printed) == (0, "7\n")


def test_a_folder_is_a_model_and_its_weights_are_taken(tmp_path: Path) -> None:
    size = size_of(str(save_tiny_model(tmp_path / "model")))
    model = build_model(size)
    assert (size.layers, size.vocabulary) == (model.config.num_hidden_layers, model.config.vocab_size)
    assert model.dtype == torch.float32
    with pytest.raises(SystemExit, match="neither one of tiny, small"):
        size_of("/nowhere")
