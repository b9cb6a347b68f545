"""Recorded runs in one small file: what the doctor reads of them, with numbers of tokens at fewer digits."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.doctor import examine
from skyrl_train.telemetry.reading import find_runs

KEPT = ("config.yaml", "plan.json", "metrics.jsonl", "rollouts", "samples")
"""Files and folders of a run that the doctor reads. The command line, logs and pictures would say what was planted."""
COLUMNS = (
    *("global_step", "purpose", "uid", "sample", "turn", "num_turns", "trajectory_reward", "failure_kind"),
    *("failure_message", "outcome", "env_class", "dataset", "prompt", "extras", "metrics", "rewards", "observations"),
    *("tool_calls", "text", "stop_reason", "error", "tools"),
    *("added_token_ids", "response_token_ids", "logprobs", "loss_mask", "advantages", "policy_logprobs"),
)
_MANTISSA_BITS = 9
"""Of log-probabilities: their relative error is below a thousandth."""
_DIGITS = 6


def pack(folder: Path, setting: str, archive: Path) -> None:
    """Write the recorded runs of a setting, and what audits said, into one file.

    Raises ValueError where the doctor names other findings of what is packed.
    """
    with tempfile.TemporaryDirectory(prefix="diseases-") as made:
        small = Path(made)
        runs = sorted(each for each in (folder / setting).iterdir() if each.is_dir())
        for run in runs:
            _shrink(run, small / setting / run.name)
            if (was := _findings(run)) != (now := _findings(small / setting / run.name)):
                raise ValueError(f"{run}: {was} became {now}")
        audits = folder / f"{setting}_audits"
        if audits.is_dir():
            shutil.copytree(audits, small / audits.name)
        files = [each for each in small.rglob("*") if each.is_file()]
        with tarfile.open(archive, "w:xz", preset=9) as packed:
            for file in sorted(
                files, key=lambda each: (each.suffix, each.name, str(each))
            ):  # the like beside each other
                entry = tarfile.TarInfo(str(file.relative_to(small)))
                entry.size = file.stat().st_size
                with file.open("rb") as opened:
                    packed.addfile(entry, opened)


def unpack(archive: Path, folder: Path) -> None:
    """Write the runs of an archive into a folder, as `make` does."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
        packed.extractall(folder)


def _findings(run: Path) -> list[tuple[str, str]]:
    return [(each.rule, each.level) for each in examine(find_runs([run])[0])[0]]


def _shrink(run: Path, small: Path) -> None:
    """Copy what is kept of a run."""
    small.mkdir(parents=True)
    for name in KEPT:
        for source in sorted((run / name).iterdir()) if (run / name).is_dir() else [run / name]:
            target = small / source.relative_to(run)
            target.parent.mkdir(exist_ok=True)
            if source.suffix == ".parquet":
                _rewrite(source, target)
            elif source.name == "metrics.jsonl":
                lines = [_rounded(json.loads(line)) for line in source.read_text().splitlines()]
                target.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            elif source.is_file():
                shutil.copyfile(source, target)


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value for name, value in record.items()
    }


def _rewrite(source: Path, target: Path) -> None:
    """Write the columns that are read, without compression, which that of the whole archive does better."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(source, columns=list(COLUMNS)).replace_schema_metadata(None)
    for name in ("logprobs", "policy_logprobs"):
        column = table.column(name).combine_chunks()
        if column.null_count < len(column):
            bits = np.array(column.values.to_numpy(zero_copy_only=False), np.float32).view(np.uint32)
            half = np.uint32(1 << (22 - _MANTISSA_BITS))
            kept = np.where(np.isfinite(bits.view(np.float32)), (bits + half) & ~(2 * half - np.uint32(1)), bits)
            values = pa.array(kept.astype(np.uint32).view(np.float32))
            lists = pa.ListArray.from_arrays(column.offsets, values, mask=column.is_null())
            table = table.set_column(table.schema.get_field_index(name), name, lists)
    pq.write_table(
        table,
        target,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        column_encoding={
            "logprobs.list.element": "BYTE_STREAM_SPLIT",
            "policy_logprobs.list.element": "BYTE_STREAM_SPLIT",
        },
    )
