"""A folder of a run for each model, which `skyrl-view FOLDER` opens while the server goes on.

    outcome on disk --> runs/TENANT-000003/metrics.jsonl             a line for each optimizer step
                    --> runs/TENANT-000003/samples/step_000012.jsonl  some of what was sampled since that step

They are for people: nothing reads them back, and what a server that is killed had not written stays away.
"""

from __future__ import annotations

import base64
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError
from skyrl_train.serve.asked import Adam, checked
from skyrl_train.serve.records import Model, Records, Request
from skyrl_train.serve.wire import as_json, input_of_json
from skyrl_train.system import WorkerThread
from skyrl_train.system.files import json_line, make_folder, write_json
from skyrl_train.telemetry import MetricsLog, RunFolder, read_metrics

DECLARED_METRICS = """
serve/loss_sum | nats | `loss:sum` of the passes whose gradients the step took, added up. | each optimizer step of a served
    model
serve/{passes,examples} | count | Of these passes; the examples in them. | the same
serve/samples | count | Sequences that were sampled of the model since the step before. | the same
serve/learning_rate | | As the client asked for it. | the same
serve/requests_open | count | The tenant's requests that were promised and had no outcome yet. | the same
"""
_SAMPLES_A_STEP = 32
"""That are written out; all are counted."""
_CLOSE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Shown:
    """What is known of one model since its last optimizer step."""

    folder: RunFolder
    step: int
    since: float
    loss_sum: float = 0.0
    num_passes: int = 0
    num_examples: int = 0
    num_samples: int = 0


class RunFolders:
    """Writes them, on a thread of its own."""

    def __init__(self, records: Records, folder: Path, text_of: Callable[[str, Sequence[int]], str]) -> None:
        """`folder`: of the server; `text_of` decodes tokens of a base, as it is recorded."""
        self._records, self._folder, self._text_of = records, folder / "runs", text_of
        self._shown: dict[str, _Shown] = {}
        self._thread = WorkerThread("run-folders")
        self._has_failed = False

    def take(self, request: Request, line: Mapping[str, Any]) -> None:
        """Have an outcome written where it says something of a model. Never raises: no request fails for it."""
        model = self._model_of(request)
        if model is None or "error" in line or request.verb not in _WRITERS:
            return
        num_open = self._records.num_open[model.tenant]
        self._thread.submit(self._write, model, request, line, num_open)

    def close(self) -> None:
        """Write what is left."""
        self._thread.close(_CLOSE_TIMEOUT_S)

    def _model_of(self, request: Request) -> Model | None:
        """A verb's model, or the one whose weights are sampled from; None for samples of the base."""
        if request.verb == "sample":
            return self._records.model_of(self._records.samplers[request.owner])
        return self._records.models.get(request.owner)

    def _write(self, model: Model, request: Request, line: Mapping[str, Any], num_open: int) -> None:
        try:
            shown = self._shown.get(model.model_id) or self._open(model)
            _WRITERS[request.verb](self, shown, request, line, num_open)
        except (OSError, DataError) as error:
            if not self._has_failed:
                logger.warning("folders of runs, for skyrl-view, are not written: %s", error)
            self._has_failed = True

    def _open(self, model: Model) -> _Shown:
        folder = RunFolder(self._folder / f"{model.tenant}-{model.number:06d}")
        make_folder(folder.samples)
        facts = {"tenant": model.tenant, "model_id": model.model_id, **model.facts.line()}
        write_json(folder.config_file, {**facts, "user_metadata": model.metadata})
        (folder.root / ".lock").write_text(str(os.getpid()))
        steps = [record["step"] for record in read_metrics(folder.metrics_file, keeps=lambda _: False)]
        shown = _Shown(folder=folder, step=max(steps, default=0), since=time.monotonic())
        self._shown[model.model_id] = shown
        return shown

    def _pass(self, shown: _Shown, request: Request, line: Mapping[str, Any], num_open: int) -> None:
        del request, num_open
        found = as_json(line["message"], base64.b64decode(line["data"]))
        shown.loss_sum += found["metrics"]["loss:sum"]
        shown.num_passes += 1
        shown.num_examples += len(found["loss_fn_outputs"])

    def _step(self, shown: _Shown, request: Request, line: Mapping[str, Any], num_open: int) -> None:
        now = time.monotonic()
        metrics = {
            **{name: float(value) for name, value in line["json"]["metrics"].items()},
            "serve/loss_sum": shown.loss_sum,
            "serve/passes": shown.num_passes,
            "serve/examples": shown.num_examples,
            "serve/samples": shown.num_samples,
            "serve/learning_rate": checked(Adam, request.content, "adam_params").step().lr,
            "serve/requests_open": num_open,
            "timing/step": now - shown.since,
        }
        shown.step, shown.since = shown.step + 1, now
        shown.loss_sum, shown.num_passes, shown.num_examples, shown.num_samples = 0.0, 0, 0, 0
        MetricsLog(shown.folder.metrics_file).log(metrics, step=shown.step)

    def _sample(self, shown: _Shown, request: Request, line: Mapping[str, Any], num_open: int) -> None:
        del num_open
        base = self._records.base_of(self._records.samplers[request.owner])
        tokens, images = input_of_json(request.content["prompt"])
        prompt = f"[{len(images)} images] " * bool(images) + self._text_of(base, tokens.tolist())
        sequences = as_json(line["message"], base64.b64decode(line["data"]))["sequences"]
        room = max(0, _SAMPLES_A_STEP - shown.num_samples)
        lines = [
            json_line(
                {
                    "set": request.owner,
                    "example": f"{request.seq}:{number}",
                    "prompt": prompt,
                    "answer": self._text_of(base, each["tokens"]),
                    "stop_reason": each["stop_reason"],
                }
            )
            for number, each in enumerate(sequences[:room])
        ]
        shown.num_samples += len(sequences)
        with open(shown.folder.samples / f"step_{shown.step:06d}.jsonl", "ab") as file:
            file.write(b"".join(lines))


_WRITERS: Mapping[str, Callable[[RunFolders, _Shown, Request, Mapping[str, Any], int], None]] = {
    "forward_backward": RunFolders._pass,
    "optim_step": RunFolders._step,
    "sample": RunFolders._sample,
}
"""By verb."""
