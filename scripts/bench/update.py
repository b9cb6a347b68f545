"""Time and memory of a policy update: identical rollouts, model and gradient; only layout, or trainer, differs.

    python scripts/bench/update.py compare --models tiny,mid --kinds single,step --rounds 3
    python scripts/bench/update.py shapes --model FOLDER --dtypes float32,bfloat16      # of a model of Hugging Face's
    python scripts/bench/update.py bound --models builtin:tiny_qwen2,small,FOLDER --dtypes float32,bfloat16
    python scripts/bench/update.py growth                      # cost against turns and samples, and the plot
    python scripts/bench/update.py head                        # logits memory at a large vocabulary
    python scripts/bench/update.py --device cuda               # tokens/s and GPU, model FLOPs utilisation; or --device cpu
    python scripts/bench/update.py --device cuda --forms eager,compiled,graphs      # ranks: scripts/bench/update_ranks.py

Every measurement is a process of its own, one thread, so that peak memory is its own; variants take turns, round after
round, and medians of CPU seconds are quoted. Gradients are compared first, by the rule of `update_checks.py`, and a process
that takes more than `--memory-gb` is ended. TRL, verl and OpenRLHF are measured where they can be imported, or lie in a
folder of their own, which is put before everything else for its processes alone, so that all run on one torch:

    python scripts/bench/update.py peers           # pip installs the releases below into ~/.cache/skyrl_train/peers, once
    python scripts/bench/update.py shapes          # how many times faster, over shapes of rollouts; a missing peer is named

`bound` prints what each shape must compute at least, the least time of this core for it (`update_bound.py`,
`core_rates.py`), and which share of that each trainer reaches; a share above 1 is an error and the exit status 1. With
`--costs` it names what takes 3 % of our update or more.

`--at NAME=FOLDER` names another folder. `--tokens` is the cap of a micro-batch for all but TRL, which counts rows and
gets 8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import core_rates
import harness
from update_checks import compare_gradients
from update_peers import PACKAGES, PEERS, install, is_there, package_folders
from update_work import KINDS, SHAPES, size_of

from skyrl_train.system import LARGE_PAGES

OURS = ("padded", "packed", "merged", "shared", "auto")
CURVES = {"padded": "padded", "packed": "packed", "shared": "turns merged, prefixes shared"}
"""What `growth` draws: name of a layout to its label."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="measure updates on one device, on the wall clock")
    parser.add_argument("--model", help="with --device: tiny, mid or qwen2.5-0.5b (the default on cuda; tiny on cpu)")
    parser.add_argument("--kind", default="single", help="with --device: single or step")
    parser.add_argument("--layouts", default="padded,packed,shared,auto", help="with --device")
    parser.add_argument("--steps", type=int, default=3, help="with --device: timed updates")
    parser.add_argument("--tokens", type=int, default=16384, help="with --device: computed positions of a micro-batch")
    parser.add_argument("--float32", action="store_true", help="with --device cuda: not bfloat16")
    parser.add_argument("--forms", default="eager", help="with --device: of eager, compiled and, on cuda, graphs")
    parser.add_argument("--checkpointing", action="store_true", help="with --device: recompute activations")
    commands = parser.add_subparsers(dest="command")
    compare, shapes = commands.add_parser("compare"), commands.add_parser("shapes")
    compare.add_argument("--models", default="tiny,mid")
    compare.add_argument("--kinds", default="single,step")
    compare.add_argument("--variants", default=",".join(["trl", *OURS, *list(PEERS)[1:]]))
    bound = commands.add_parser("bound")
    bound.add_argument("--models", default="builtin:tiny_qwen2,small")
    bound.add_argument("--shapes", default=",".join(SHAPES))
    bound.add_argument("--peers", default="", help="of those that are installed: " + ",".join(PEERS))
    bound.add_argument("--costs", action="store_true", help="name what takes 3 % of our update or more")
    shapes.add_argument("--models", default="tiny,small")
    shapes.add_argument("--shapes", default=",".join(SHAPES))
    shapes.add_argument("--peers", default=",".join(PEERS), help="the other columns stay empty")
    for each in (compare, shapes, bound):
        each.add_argument("--model", metavar="FOLDER", help="a model of Hugging Face's in place of --models")
        each.add_argument(
            "--at", action="append", default=[], metavar="PACKAGE=FOLDER", help="where a peer is installed"
        )
        each.add_argument("--rounds", type=int, default=3)
        each.add_argument("--steps", type=int, default=1, help="timed updates in each process")
        each.add_argument("--untimed", type=int, default=1, help="updates before them")
        each.add_argument("--dtypes", default="float32", help="of float32 and bfloat16")
    growth = commands.add_parser("growth")
    growth.add_argument("--model", default="tiny")
    growth.add_argument("--plot", default=str(harness.ROOT / "docs" / "images" / "update_cost.png"))
    growth.add_argument("--steps", type=int, default=3)
    for each in (compare, shapes, growth, bound):
        each.add_argument("--tokens", type=int, default=4096, help="computed positions of a micro-batch (ours)")
    head = commands.add_parser("head")
    head.add_argument("--vocabulary", type=int, default=151_936)
    head.add_argument("--hidden", type=int, default=896)
    head.add_argument("--tokens", default="1024,2048")
    commands.add_parser("peers")
    one = commands.add_parser("one", help="a single measurement, as JSON")
    one.add_argument("spec", help="JSON")
    args = parser.parse_args(argv)
    if args.device:
        run_device(args)
        return
    if args.command is None:
        parser.error("name a command (shapes, compare, growth, head, peers), or --device")
    {
        "shapes": run_shapes,
        "bound": run_bound,
        "compare": run_compare,
        "growth": run_growth,
        "head": run_head,
        "peers": install,
        "one": run_one,
    }[args.command](args)


def run_device(args: argparse.Namespace) -> None:
    """Tokens per second and model FLOPs utilisation of one device, a line for each layout."""
    import torch
    from update_device import measure

    if args.device == "cpu":
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device here; --device cpu runs on this machine")
    args.model = args.model or ("tiny" if args.device == "cpu" else "qwen2.5-0.5b")
    args.bf16 = args.device == "cuda" and not args.float32
    measure(args)


def run_compare(args: argparse.Namespace) -> None:
    """A table for each model and kind of rollouts."""
    folders = package_folders(args.at)
    variants = [name for name in args.variants.split(",") if name not in PEERS or is_there(PEERS[name][0], folders)]
    for model, dtype, kind in product(_models(args), args.dtypes.split(","), args.kinds.split(",")):
        found, failed = _interleaved(args, model, dtype, kind, variants, folders, {})
        table = harness.Table(
            *("variant", "positions", "CPU s", "faster", "peak memory, MiB", "share", "gradient distance"),
            title=f"{model}, {kind}, {dtype}",
        )
        first = next(iter(found.values()), {})
        for variant, row in found.items():
            table.row(
                variant,
                f"{row['positions']:,}",
                f"{row['cpu_s']:.2f}",
                f"{first['cpu_s'] / row['cpu_s']:.1f}x",
                f"{row['peak_mib']:,.0f}",
                f"{row['peak_mib'] / first['peak_mib']:.2f}",
                f"{row['distance']:.1e}{_note(row)}",
            )
        for name, reason in failed.items():
            print(f"{name}: {reason}", flush=True)


def run_shapes(args: argparse.Namespace) -> None:
    """One table a model: over shapes, our update's seconds, how many times as long each peer's takes, and our peak memory
    over that of TRL's. The column of a peer that is not installed is empty, and a line before the tables says so."""
    folders = package_folders(args.at)
    asked = args.peers.split(",")
    there = [name for name in asked if is_there(PEERS[name][0], folders)]
    for package in PACKAGES:
        if any(PEERS[name][0] == package for name in asked if name not in there):
            print(f"{package} is missing: python scripts/bench/update.py peers")
    for model, dtype in product(_models(args), args.dtypes.split(",")):
        columns = ("shape", "rows", "positions", "CPU s", *PEERS, "best", "memory")
        table = harness.Table(*columns, title=f"{model}, {dtype}")
        for shape in args.shapes.split(","):
            kind, work = SHAPES[shape]
            found, missing = _interleaved(args, model, dtype, kind, ["auto", *there], folders, work)
            if "auto" not in found:
                raise SystemExit(f"{model}, {shape}, {dtype} failed:\n{missing['auto']}")
            ours = found.pop("auto")
            times = {name: row["cpu_s"] / ours["cpu_s"] for name, row in found.items()}
            best = min((times[name] for name, row in found.items() if not row["differs"]), default=float("nan"))
            table.row(
                shape,
                ours["rows"],
                f"{ours['positions']:,}",
                f"{ours['cpu_s']:.2f}{_note(ours)}",
                *(
                    f"{times[name]:.1f}x{_note(found[name])}" if name in times else missing.get(name, "")
                    for name in PEERS
                ),
                f"**{best:.1f}x**",
                f"{ours['peak_mib'] / found['trl']['peak_mib']:.2f}" if "trl" in found else "",
            )


def run_bound(args: argparse.Namespace) -> None:
    """Two tables: what each shape must compute and move, with the least seconds for it; and each trainer's share of that.

    Raises SystemExit where a share is above 1: the count or the rates are wrong then.
    """
    from update_bound import Work

    folders = package_folders(args.at)
    peers = [name for name in filter(None, args.peers.split(",")) if is_there(PEERS[name][0], folders)]
    now = core_rates.measured_now()
    best = core_rates.kept() or now
    print(f"core now: {now.line()}; best seen: {best.line()}; load {os.getloadavg()[0]:.1f}", flush=True)
    table = harness.Table(
        *("model, type, shape", "trainer", "positions", "distinct", "linear / attention / head, GFLOP"),
        *("weights / optimizer, MB", "least s", "CPU s", "share", "of the best core", "peak / held, MiB"),
    )
    above: list[str] = []
    for model, dtype, shape in product(_models(args), args.dtypes.split(","), args.shapes.split(",")):
        kind, content = SHAPES[shape]
        found, missing = _interleaved(args, model, dtype, kind, ["auto", *peers], folders, {**content, "bound": True})
        if "auto" not in found:
            raise SystemExit(f"{model}, {shape}, {dtype} failed:\n{missing['auto']}")
        now = core_rates.measured_now()  # as it is around this measurement, and not an hour ago
        work = Work(**found["auto"]["extra"]["work"])
        least, least_best = work.least_s(now, dtype), work.least_s(core_rates.kept() or now, dtype)
        for name, row in found.items():
            ratio = least / row["cpu_s"]
            table.row(
                f"{model}, {dtype}, {shape}",
                name,
                f"{row['positions']:,}",
                f"{work.positions:,}",
                " / ".join(f"{each / 1e9:,.1f}" for each in (work.linear, work.attention, work.head)),
                " / ".join(f"{each / 1e6:,.1f}" for each in (work.weight_bytes, work.optimizer_bytes)),
                f"{least:.3f}",
                f"{row['cpu_s']:.3f}",
                f"{ratio:.1%}",
                f"{least_best / row['cpu_s']:.1%}",
                _memory(row["extra"]),
            )
            above += [f"{model}, {shape}, {dtype}, {name}: {ratio:.3f}"] if ratio > 1 else []
        if args.costs:
            print(
                f"costs: {', '.join(f'{name} {share:.1%}' for name, share in found['auto']['extra']['costs'].items())}"
            )
        for name, reason in missing.items():
            print(f"{name}: {reason}", flush=True)
    if above:
        raise SystemExit("above the bound, so the count or the rates are wrong:\n" + "\n".join(above))


def _models(args: argparse.Namespace) -> list[str]:
    return [args.model] if args.model else args.models.split(",")


def _memory(extra: dict[str, Any]) -> str:
    """The peak of an update without what the process held beside it, over what must be held; empty for a peer's."""
    if not extra:
        return ""
    return f"{extra['peak_mib']:,.0f} / {extra['held_mib']:,.0f} = {extra['peak_mib'] / extra['held_mib']:.2f}"


def _note(row: dict[str, Any]) -> str:
    return " **differs**" if row["differs"] else ""


def _interleaved(
    args: argparse.Namespace,
    model: str,
    dtype: str,
    kind: str,
    variants: Sequence[str],
    folders: dict[str, str],
    work: dict[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Medians of each variant, and the reasons of those that failed."""
    if kind != "step":  # merging turns means something only where there are several
        variants = [each for each in variants if each not in ("merged", "trl_merged")]
    with tempfile.TemporaryDirectory() as folder:

        def measure(variant: str, number: int) -> dict[str, Any]:
            spec = {
                "model": model,
                "kind": kind,
                "variant": variant,
                "steps": args.steps,
                "untimed": args.untimed,
                "tokens": args.tokens,
                "bf16": dtype == "bfloat16",
                "gradients": "" if number else f"{folder}/{variant}.pt",
                "work": {name: each for name, each in work.items() if name != "bound"},
                "bound": bool(work.get("bound")) and number == args.rounds - 1,
            }
            return _measure(spec, folders.get(PEERS[variant][0], "") if variant in PEERS else "")

        samples, failed = harness.in_turns(variants, range(args.rounds), measure)
        files = {name: Path(folder) / f"{name}.pt" for name in samples}
        distances, differing = compare_gradients(files, dtype) if files else ({}, set())
    found = {
        variant: {
            "cpu_s": statistics.median(s for each in rounds for s in each["cpu_s"]),
            "positions": rounds[0]["positions"],
            "rows": rounds[0].get("rows", 0),
            "peak_mib": statistics.median(each["peak_mib"] for each in rounds),
            "distance": distances[variant],
            "extra": rounds[-1].get("extra", {}),
            "differs": variant in differing,
        }
        for variant, rounds in samples.items()
    }
    return found, {name: reason[:80] for name, reason in failed.items()}


def _measure(spec: dict[str, Any], overlay: str = "") -> dict[str, Any]:
    """`overlay` is a folder of packages that come first. Raises MeasurementError."""
    settings = {} if spec["variant"] in PEERS else LARGE_PAGES  # as a run of ours sets it
    found: dict[str, Any] = harness.answer(
        harness.apart([__file__, "one", json.dumps(spec)], packages=[overlay], **settings)
    )
    harness.log({**spec, **found})
    return found


def run_one(args: argparse.Namespace) -> None:
    """The inside of a measuring process."""
    import torch

    spec = json.loads(args.spec)
    torch.set_num_threads(1)
    size = size_of(spec["model"])
    conversations = KINDS[spec["kind"]](size.vocabulary, **spec.get("work", {}))
    run = _run_peer if spec["variant"] in PEERS else _run_ours
    found = run(spec, size, conversations)
    gradients = found.pop("gradients")
    if spec["gradients"]:
        torch.save(gradients, spec["gradients"])
    print(json.dumps(found | {"peak_mib": harness.peak_mib()}))


def _run_ours(spec: dict[str, Any], size: Any, conversations: list[Any]) -> dict[str, Any]:
    from update_ours import Ours

    ours = Ours(size, conversations, variant=spec["variant"], tokens=spec["tokens"], bf16=spec["bf16"])
    begun_mib = harness.resident_mib()
    ours.score()
    ours.accumulate()
    gradients = ours.gradients() if spec["gradients"] else {}
    ours.engine.zero_grad()
    seconds = []
    for number in range(spec["untimed"] + spec["steps"]):
        start = time.process_time()
        ours.update()
        if number >= spec["untimed"]:
            seconds.append(time.process_time() - start)
    found = {"cpu_s": seconds, "positions": ours.positions, "rows": ours.batch.num_rows, "gradients": gradients}
    if spec.get("bound"):
        clones_mib = sum(each.nbytes for each in gradients.values()) / 2**20
        found["extra"] = _bound_of(ours, size, statistics.median(seconds), begun_mib + clones_mib)
    return found


def _bound_of(ours: Any, size: Any, cpu_s: float, begun_mib: float) -> dict[str, Any]:
    """What the update must compute, and what it holds and costs, by two more updates that are looked at. `begun_mib` was
    there with the weights and nothing else."""
    from update_bound import Costs, held_mib, work_of

    peak = harness.peak_of(ours.update)
    with Costs() as costs:
        ours.update()
    parameters = sum(parameter.numel() for parameter in ours.engine.parameters.values())
    return {
        "work": asdict(work_of(ours.batch, size, parameters)),
        "costs": costs.named(cpu_s),
        "held_mib": held_mib(ours),
        "peak_mib": peak - begun_mib + 4 * parameters / 2**20,
    }


def _run_peer(spec: dict[str, Any], size: Any, conversations: list[Any]) -> dict[str, Any]:
    from importlib import import_module

    package, form = PEERS[spec["variant"]]
    stated = {name: spec[name] for name in ("steps", "untimed", "tokens", "bf16")}
    run = import_module(f"update_{package}").run
    found: dict[str, Any] = run(size, conversations, **form, **stated, keep_gradients=bool(spec["gradients"]))
    return found


def run_growth(args: argparse.Namespace) -> None:
    """CPU seconds against turns (step-wise) and samples (single turn), for three layouts; and a plot of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=130, layout="constrained")
    parts = (
        ("turns", "step", "turns of a trajectory", (1, 2, 4, 8, 16), {"prompts": 1, "samples": 2}),
        ("samples", "single", "samples of a prompt", (1, 2, 4, 8, 16, 32), {"prompts": 1}),
    )
    for axis, (name, kind, label, counts, work) in zip(figure.subplots(1, 2), parts):
        for variant in CURVES:
            points = []
            for count in counts:
                spec = {"model": args.model, "kind": kind, "variant": variant, "steps": args.steps, "untimed": 1}
                spec |= {"tokens": args.tokens, "bf16": False, "gradients": "", "work": {**work, name: count}}
                found = _measure(spec)
                points.append(statistics.median(found["cpu_s"]))
                print(name, variant, count, points[-1], found["positions"], flush=True)
            axis.plot(counts, points, marker="o", label=CURVES[variant])
        axis.set_xlabel(label)
        axis.set_ylabel("CPU seconds of an update")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    path = Path(args.plot)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}")


def run_head(args: argparse.Namespace) -> None:
    """Time and memory of the output head, its loss and its gradients."""
    table = harness.Table("way", "tokens", "vocabulary", "CPU s", "memory, MiB")
    for tokens in map(int, args.tokens.split(",")):
        for way in ("full", "tiled", "fused"):
            code = f"from update_head import measure; measure({way!r}, {tokens}, {args.hidden}, {args.vocabulary})"
            try:
                # Blocks of this size are given back at once, so that what is held is what is in use.
                said = harness.apart(["-c", code], packages=[str(harness.FOLDER)], MALLOC_MMAP_THRESHOLD_="65536")
            except harness.MeasurementError as error:
                said = f"{way} {tokens:,} {args.vocabulary:,} failed: {str(error).splitlines()[-1].replace(' ', '_')}"
            table.row(*said.split())


if __name__ == "__main__":
    harness.run(main)
