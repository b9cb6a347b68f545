"""Writes the tables of `docs/scale.md`, by the arithmetic of `skyrl_train/plan/forms/scale.py` and simulated schedules.

    python -m scripts.studies.make_scale_tables             # all tables, into the page
    python -m scripts.studies.make_scale_tables --print     # to the terminal
    python -m scripts.studies.make_scale_tables --print --lengths gsm8k/train.jsonl

One training batch is 512 prompts with 8 samples, one optimizer step; lengths are stated, or those of a run's rollouts, or of
the lines of a file with `question` and `answer`, in words, numbers and signs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from scripts.studies.simulated_runs import (
    Latency,
    Lengths,
    paired_lengths,
    recorded_lengths,
    rollouts_of,
    stated_lengths,
)
from scripts.studies.simulation import LearnerRates, Schedule, Simulated, simulate
from skyrl_train.config import MicroBatchConfig
from skyrl_train.config.models import StrategyConfig
from skyrl_train.plan.forms import (
    Device,
    ScaledModel,
    StepWork,
    StreamedSync,
    Update,
    Work,
    allocations,
    devices_per_engine,
    engine_rates,
    micro_batch_sizes,
    rank_forms,
    streamed_sync,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
MODELS = ("Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-70B", "Qwen3-30B-A3B")
GPUS = (1, 8, 64, 512)
SPLITS = ((8, 8), (64, 448), (256, 256))
"""GPUs that train and that generate."""
PROMPTS, SAMPLES = 512, 8
STALENESS = (1, 4)
STEPS, WARM_UP = 6, 1
TOOLS = Latency(median_s=30.0, sigma=1.0)
ROW_S = 5.5e-5
"""Of the loop's process for a row: `scripts/bench/data_plane.py --rows 4096` on one core of a server."""
DEVICE = Device()
SEARCHED = ("fsdp_size", "expert_parallel_size", "cpu_offload")
"""What the first table chooses of a strategy, as `placement=auto` does; ranks with parts of matrices have a table."""


@cache
def lengths_of(path: str = "") -> Lengths:
    """Return the stated lengths, those of the run in a folder, or of a file's lines. Raises DataError, OSError."""
    if not path:
        return stated_lengths(prompt=300, median=1500, sigma=0.9, longest=16_000)
    if Path(path).is_dir():
        return recorded_lengths(rollouts_of(Path(path)), source=path)
    rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    pairs = [tuple(len(re.findall(r"\w+|[^\w\s]", row[name])) for name in ("question", "answer")) for row in rows]
    return paired_lengths(pairs, source=path)


def work_of(lengths: Lengths) -> Work:
    """Return what one batch of such rows is."""
    rows = [sample[-1][1] + sample[-1][2] for prompt in lengths.prompts for sample in prompt]
    mean = sum(rows) / len(rows)
    return Work(tokens=PROMPTS * SAMPLES * mean, mean_length=sum(n * n for n in rows) / sum(rows), longest=max(rows))


def table(columns: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    """Return Markdown."""
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def gigabytes(count: float) -> str:
    """Return GB of 10^9 bytes, to three digits."""
    return f"{count / 1e9:,.0f}" if count >= 1e11 else f"{count / 1e9:.3g}"


def number(value: float) -> str:
    """Return three digits, and thousands without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def layout(update: Update) -> str:
    """Return how ranks lie, in words of the configuration."""
    name = f"{update.mesh.shard} x {update.mesh.replicate}" if update.mesh.replicate > 1 else f"{update.mesh.shard}"
    name += f", EP {update.mesh.expert}" if update.mesh.expert > 1 else ""
    what = "optimizer offload" if update.memory.get("parameters") else "offload"
    return name + (f", {what} ({gigabytes(update.host_bytes)})" if update.host_bytes else "")


def best_update(model: ScaledModel, num_gpus: int, work: Work, *, tensor: int = 1) -> Update:
    """Return the update in the best form that `placement=auto` finds on paper for so many GPUs that only train."""
    nodes, per_node = max(1, num_gpus // DEVICE.node_size), min(num_gpus, DEVICE.node_size)
    forms = rank_forms(
        model,
        StepWork(
            update=work,
            num_updates=1.0,
            micro_batches=micro_batch_sizes(work.longest, MicroBatchConfig().max_positions),
        ),
        DEVICE,
        allocations(nodes, per_node, shares=True, apart=False),
        StrategyConfig(name="fsdp2", tensor_parallel_size=tensor),
        SEARCHED,
    )
    return next(form.update for form in forms if form.update.fits(DEVICE))


def update_table(work: Work) -> str:
    """Return the table of memory and seconds of an update."""
    columns = ("model", "GPUs", "shards x replicas", "memory, GB", "step, s", "links, s", "sync, s")

    def rows() -> Iterator[Sequence[object]]:
        for name in MODELS:
            for gpus in GPUS:
                found = best_update(ScaledModel.named(name), gpus, work)
                times = (found.step_s, found.links_s, found.seconds["weight sync"])
                yield name, gpus, layout(found), gigabytes(found.memory_bytes), *map(number, times)

    return table(columns, rows())


def tensor_table(work: Work) -> str:
    """Return the table of updates of dense models by ranks with parts of each matrix: as many as make the shortest step,
    beside the step of ranks with whole ones."""
    columns = ("model", "GPUs", "parts", "shards x replicas", "memory, GB", "step, s", "without, s")

    def rows() -> Iterator[Sequence[object]]:
        for model in (ScaledModel.named(name) for name in MODELS[:3]):
            for gpus in GPUS[1:]:
                whole = best_update(model, gpus, work)
                found = min(
                    (best_update(model, gpus, work, tensor=size) for size in (2, 4, 8) if model.kv_heads % size == 0),
                    key=lambda each: (bool(each.host_bytes), each.step_s),
                )
                yield (
                    *(model.name, gpus, found.mesh.tensor, layout(found), gigabytes(found.memory_bytes)),
                    *map(number, (found.step_s, whole.step_s)),
                )

    return table(columns, rows())


def run(
    model: ScaledModel, engine_gpus: int, learner_gpus: int, staleness: int, lengths: Lengths, tools: Latency
) -> Simulated:
    """Simulate so many GPUs of each; serially the same GPUs are both."""
    size = devices_per_engine(model, DEVICE)
    work = work_of(lengths)
    best = best_update(model, learner_gpus, work)
    sync_s = streamed(model, best, engine_gpus).seconds if staleness else best.seconds["weight sync"]
    return simulate(
        Schedule(
            batch_size=PROMPTS,
            max_staleness=staleness,
            num_engines=max(1, engine_gpus // size),
            in_flight_updates=staleness > 0,
        ),
        engine=engine_rates(model, size, DEVICE, mean_length=work.mean_length),
        learner=LearnerRates(token_s=best.step_s / work.tokens, sync_s=sync_s, row_s=ROW_S),
        make_group=lengths.groups(samples=SAMPLES, seed=0, latency=tools),
        num_steps=STEPS,
    )


def streamed(model: ScaledModel, update: Update, engine_gpus: int) -> StreamedSync:
    """Return the weight sync from the GPUs of an update to so many others."""
    per_node, num_bytes = DEVICE.node_size, int(model.engine_bytes * model.counts.total)
    return streamed_sync(
        num_bytes, update.mesh, DEVICE, ranks_per_node=per_node, workers=engine_gpus, workers_per_node=per_node
    )


def sync_table(work: Work) -> str:
    """Return the table of bytes on each link in a weight sync between GPUs that share no node."""
    columns = ("model", "train / generate", "enter", "across", "within", "sync, s")

    def rows() -> Iterator[Sequence[object]]:
        for name in MODELS:
            model = ScaledModel.named(name)
            for learner_gpus, engine_gpus in SPLITS:
                found = streamed(model, best_update(model, learner_gpus, work), engine_gpus)
                enter, across, within = (found.links[stage] for stage in ("enter", "across", "within"))
                yield (
                    *(name, f"{learner_gpus} / {engine_gpus}", gigabytes(enter.network), gigabytes(across.network)),
                    *(gigabytes(within.local), f"{found.seconds:,.2g}"),
                )

    return table(columns, rows())


def schedule_table(lengths: Lengths, num_gpus: int = GPUS[-1]) -> str:
    """Return the table of simulated steps."""
    columns = ("model", "tools", "serial, s", "engines / learner")

    def rows() -> Iterator[Sequence[object]]:
        for name in MODELS:
            model = ScaledModel.named(name)
            for label, tools in (("none", Latency()), ("30 s", TOOLS)):
                serial = run(model, num_gpus, num_gpus, 0, lengths, tools)
                step_s = serial.mean_step_s(WARM_UP)
                # Engines get the share of the GPUs that they computed of the serial step, in eighths.
                generated = serial.engine_busy * step_s
                trained = step_s - sum(serial.wait_s[WARM_UP:]) / (STEPS - WARM_UP)
                eighths = min(7, max(1, round(8 * generated / (generated + trained))))
                size = devices_per_engine(model, DEVICE)
                engines = max(1, num_gpus * eighths // 8 // size) * size
                cells: list[str] = []
                if size > num_gpus:
                    step_s = math.nan  # not even an engine has room
                for staleness in STALENESS:
                    if engines >= num_gpus:
                        cells += ["", ""]
                        continue
                    found = run(model, engines, num_gpus - engines, staleness, lengths, tools)
                    seconds = found.mean_step_s(WARM_UP)
                    cells += [number(seconds), f"{step_s / seconds:.2f}"]
                split = f"{engines} / {num_gpus - engines}" if engines < num_gpus else ""
                yield name, label, number(step_s), split, *cells

    more = [name for each in STALENESS for name in (f"staleness {each}, s", "times serial")]
    return table((*columns, *more), rows())


def sections(path: str = "") -> dict[str, str]:
    """Return the tables by the name that stands around them in the page."""
    lengths = lengths_of(path)
    work = work_of(lengths)
    return {
        "update": update_table(work),
        "sync": sync_table(work),
        "tensor": tensor_table(work),
        "schedule": schedule_table(lengths),
    }


def put(page: str, name: str, content: str) -> str:
    """Return the page with another table between its marks. Raises ValueError where they are missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{PAGE} has no {begin.strip()} ... {end.strip()}")
    return f"{before}{begin}{content}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="to the terminal")
    parser.add_argument("--lengths", default="", metavar="FILE", help="JSON lines with question and answer")
    args = parser.parse_args(arguments)
    found = sections(args.lengths)
    if args.print or args.lengths:
        print("\n\n".join(found.values()))
        return 0
    page = PAGE.read_text(encoding="utf-8")
    for name, content in found.items():
        page = put(page, name, content)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
