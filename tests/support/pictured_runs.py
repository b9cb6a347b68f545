"""A run's folder whose messages have images, whole and damaged ones, for tests of the viewer."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image as Pictures

from skyrl_train.telemetry.records import write_rollouts
from skyrl_train.types import Outcome, Prompt, RolloutBatch, Trajectory
from tests.support.fakes_trainer import make_turn

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>window.pwned=1</script></svg>'
HTML = b"<!doctype html><script>window.pwned=1</script>"


def encoded(kind: str, colour: tuple[int, int, int] = (10, 20, 200)) -> bytes:
    """A picture of 12 x 10 pixels."""
    out = io.BytesIO()
    Pictures.new("RGB", (12, 10), colour).save(out, format=kind)
    return out.getvalue()


def write_pictured_run(folder: Path) -> dict[str, str]:
    """Write a run of one trajectory of two turns, and its images; return their sums by what they are."""
    held = {
        "png": encoded("PNG"),
        "jpeg": encoded("JPEG"),
        "tiff": encoded("TIFF"),
        "changed": encoded("PNG", (1, 2, 3)),
        "cut": encoded("PNG", (3, 2, 1))[:-25],
        "svg": SVG,
        "html": HTML,
        "missing": b"",
    }
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in held.items()}
    (folder / "images").mkdir(parents=True)
    for name, data in held.items():
        if name != "missing":
            (folder / "images" / sums[name]).write_bytes(data + (b"more" if name == "changed" else b""))
    (folder / "config.yaml").write_text("run_name: pictured\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0}) + "\n", encoding="utf-8")

    def message(role: str, text: str, *names: str) -> dict[str, Any]:
        parts = [{"type": "image", "image": f"sha256:{sums[name]}"} for name in names]
        return {"role": role, "content": [*parts, {"type": "text", "text": text}]}

    prompt = Prompt(uid="p", messages=(message("user", "which colour?", "png"),))
    seen = message("tool", "look", "jpeg", "tiff", "changed", "cut", "svg", "html", "missing")
    turns = (make_turn(observations=(seen,)), make_turn(parent=0, prompt=(7,), reward=1.0))
    write_rollouts(
        folder / "rollouts",
        RolloutBatch(
            prompts=(prompt,),
            trajectories=(Trajectory(prompt_uid="p", sample_index=0, turns=turns, outcome=Outcome.DONE),),
            n_samples_per_prompt=1,
        ),
        purpose="train",
        global_step=1,
    )
    return sums
