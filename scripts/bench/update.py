"""Time and memory of a policy update: identical rollouts, model and gradient; only layout, or trainer, differs.

    python scripts/bench/update.py compare --models tiny,mid --kinds single,step --rounds 3
    python scripts/bench/update.py shapes --model FOLDER --dtypes float32,bfloat16      # of a model of Hugging Face's
    python scripts/bench/update.py growth                      # cost against turns and samples, and the plot
    python scripts/bench/update.py head                        # logits memory at a large vocabulary
    python scripts/bench/update.py --device cuda               # tokens/s and GPU, model FLOPs utilisation; or --device cpu
    python scripts/bench/update.py --device cuda --forms eager,compiled,graphs      # ranks: scripts/bench/update_ranks.py

Every measurement is a process of its own, one thread, so that peak memory is its own; variants take turns, round after
round, and medians of CPU seconds are quoted. Gradients are compared first, and a process that takes more than `--memory-gb`
is ended, by the rules of `update_checks.py`. TRL, verl and OpenRLHF are measured where they can be imported, or lie in a
folder of their own, which is put before everything else for its processes alone, so that all run on one torch:

    python scripts/bench/update.py peers           # pip installs the releases below into ~/.cache/skyrl_train/peers, once
    python scripts/bench/update.py shapes          # how many times faster, over shapes of rollouts; a missing peer is named

`--at NAME=FOLDER` names another folder. `--tokens` is the cap of a micro-batch for all but TRL, which counts rows and
gets 8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from update_checks import MeasurementError, available_gb, compare_gradients, run_within  # noqa: E402
from update_peers import PACKAGES, PEERS, install, is_there, package_folders  # noqa: E402
from update_work import SHAPES  # noqa: E402

OURS = ("padded", "packed", "merged", "shared", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    compare = commands.add_parser("compare")
    compare.add_argument("--models", default="tiny,mid")
    compare.add_argument("--kinds", default="single,step")
    compare.add_argument("--variants", default=",".join(["trl", *OURS, *list(PEERS)[1:]]))
    compare.add_argument(
        "--at", action="append", default=[], metavar="PACKAGE=FOLDER", help="where a peer is installed"
    )
    compare.add_argument("--rounds", type=int, default=3)
    compare.add_argument("--steps", type=int, default=1, help="timed updates in each process")
    compare.add_argument("--untimed", type=int, default=1, help="updates before them")
    _measured(compare)
    growth = commands.add_parser("growth")
    growth.add_argument("--model", default="tiny")
    growth.add_argument("--plot", default=str(ROOT / "docs" / "images" / "update_cost.png"))
    growth.add_argument("--steps", type=int, default=3)
    _common(growth)
    head = commands.add_parser("head")
    head.add_argument("--vocabulary", type=int, default=151_936)
    head.add_argument("--hidden", type=int, default=896)
    head.add_argument("--tokens", default="1024,2048")
    shapes = commands.add_parser("shapes")
    shapes.add_argument("--models", default="tiny,small")
    shapes.add_argument("--shapes", default=",".join(SHAPES))
    shapes.add_argument("--peers", default=",".join(PEERS), help="the other columns stay empty")
    shapes.add_argument("--at", action="append", default=[], metavar="PACKAGE=FOLDER")
    shapes.add_argument("--rounds", type=int, default=3)
    shapes.add_argument("--steps", type=int, default=1, help="timed updates in each process")
    shapes.add_argument("--untimed", type=int, default=1, help="updates before them")
    _measured(shapes)
    commands.add_parser("peers")
    one = commands.add_parser("one", help="a single measurement, as JSON")
    one.add_argument("spec", help="JSON")
    args = parser.parse_args()
    if args.device:
        run_device(args)
        return
    if args.command is None:
        parser.error("name a command (shapes, compare, growth, head, peers), or --device")
    {
        "shapes": run_shapes,
        "compare": run_compare,
        "growth": run_growth,
        "head": run_head,
        "peers": install,
        "one": run_one,
    }[args.command](args)


def _measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="a model of Hugging Face's in place of --models")
    parser.add_argument("--dtypes", default="float32", help="of float32 and bfloat16")
    parser.add_argument("--memory-gb", type=float, default=0.7 * available_gb(), help="that one process may take")
    _common(parser)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096, help="computed positions of a micro-batch (ours)")
    parser.add_argument("--json", help="append every measurement to this file")


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
    models = [args.model] if args.model else args.models.split(",")
    for model, dtype, kind in product(models, args.dtypes.split(","), args.kinds.split(",")):
        names = [name for name in variants if kind == "step" or _is_apart(name)]
        found, failed = _interleaved(args, model, dtype, kind, names, folders, {})
        _print_table(f"{model}, {kind}, {dtype}", found)
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
    models = [args.model] if args.model else args.models.split(",")
    for model, dtype in product(models, args.dtypes.split(",")):
        print(f"\n{model}, {dtype}\n")
        print(f"| shape | rows | positions | CPU s | {' | '.join(PEERS)} | best | memory |")
        print("|---" * (len(PEERS) + 6) + "|", flush=True)
        for shape in args.shapes.split(","):
            kind, work = SHAPES[shape]
            variants = [name for name in there if kind == "step" or _is_apart(name)]
            found, missing = _interleaved(args, model, dtype, kind, ["auto", *variants], folders, work)
            if "auto" not in found:
                raise SystemExit(f"{model}, {shape}, {dtype} failed:\n{missing['auto']}")
            ours = found.pop("auto")
            times = {name: row["cpu_s"] / ours["cpu_s"] for name, row in found.items()}
            far = [name for name, row in found.items() if row["differs"]]
            cells = [
                f"{times[name]:.1f}x{' **differs**' if name in far else ''}" if name in times else missing.get(name, "")
                for name in PEERS
            ]
            best = min((time for name, time in times.items() if name not in far), default=float("nan"))
            memory = f"{ours['peak_mib'] / found['trl']['peak_mib']:.2f}" if "trl" in found else ""
            own_s = f"{ours['cpu_s']:.2f}{' **differs**' if ours['differs'] else ''}"
            line = [shape, f"{ours['rows']}", f"{ours['positions']:,}", own_s, *cells]
            print(f"| {' | '.join([*line, f'**{best:.1f}x**', memory])} |", flush=True)


def _is_apart(variant: str) -> bool:
    """Merging turns means something only where there are several."""
    return variant not in ("merged", "trl_merged")


def _interleaved(
    args: argparse.Namespace,
    model: str,
    dtype: str,
    kind: str,
    variants: list[str],
    folders: dict[str, str],
    work: dict[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Medians of each variant, and the reasons of those that failed."""
    samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for variant in (each for each in variants if each not in failed):
                spec = {
                    "model": model,
                    "kind": kind,
                    "variant": variant,
                    "steps": args.steps,
                    "untimed": args.untimed,
                    "tokens": args.tokens,
                    "bf16": dtype == "bfloat16",
                    "gradients": f"{folder}/{variant}.pt" if number == 0 else "",
                    "work": work,
                }
                overlay = folders.get(PEERS[variant][0], "") if variant in PEERS else ""
                try:
                    samples[variant].append(_measure(spec, args.json, overlay, memory_gb=args.memory_gb))
                except MeasurementError as error:
                    failed[variant] = str(error).strip().splitlines()[-1][:80]
        measured = [variant for variant in variants if variant not in failed]
        distances, differing = compare_gradients({name: Path(folder) / f"{name}.pt" for name in measured}, dtype)
    found = {
        variant: {
            "cpu_s": statistics.median(s for each in samples[variant] for s in each["cpu_s"]),
            "positions": samples[variant][0]["positions"],
            "rows": samples[variant][0].get("rows", 0),
            "peak_mib": statistics.median(each["peak_mib"] for each in samples[variant]),
            "distance": distances[variant],
            "differs": variant in differing,
        }
        for variant in measured
    }
    return found, failed


def _measure(
    spec: dict[str, Any], log: str | None, overlay: str = "", *, memory_gb: float = float("inf")
) -> dict[str, Any]:
    """`overlay` is a folder of packages that come first. Raises MeasurementError, of a process that takes more than
    `memory_gb`, too."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [overlay, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, __file__, "one", json.dumps(spec)]
    code, printed, errors = run_within(command, environment, memory_gb=memory_gb, timeout_s=3600)
    if code:
        raise MeasurementError(errors[-3000:] or f"exit status {code}")
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({**spec, **found}) + "\n")
    return found


def run_one(args: argparse.Namespace) -> None:
    """The inside of a measuring process."""
    import torch
    from update_work import KINDS, size_of

    spec = json.loads(args.spec)
    torch.set_num_threads(1)
    size = size_of(spec["model"])
    conversations = KINDS[spec["kind"]](size.vocabulary, **spec.get("work", {}))
    run = _run_peer if spec["variant"] in PEERS else _run_ours
    print(json.dumps(run(spec, size, conversations)))


def _run_ours(spec: dict[str, Any], size: Any, conversations: list[Any]) -> dict[str, Any]:
    import torch
    from update_ours import Ours

    ours = Ours(size, conversations, variant=spec["variant"], tokens=spec["tokens"], bf16=spec["bf16"])
    ours.score()
    ours.accumulate()
    if spec["gradients"]:
        torch.save(ours.gradients(), spec["gradients"])
    ours.engine.zero_grad()
    seconds = []
    for number in range(spec["untimed"] + spec["steps"]):
        start = time.process_time()
        ours.update()
        if number >= spec["untimed"]:
            seconds.append(time.process_time() - start)
    return {"cpu_s": seconds, "positions": ours.positions, "rows": ours.batch.num_rows, "peak_mib": _peak_mib()}


def _run_peer(spec: dict[str, Any], size: Any, conversations: list[Any]) -> dict[str, Any]:
    from importlib import import_module

    import torch

    package, form = PEERS[spec["variant"]]
    found = import_module(f"update_{package}").run(
        size,
        conversations,
        **form,
        steps=spec["steps"],
        untimed=spec["untimed"],
        tokens=spec["tokens"],
        bf16=spec["bf16"],
        keep_gradients=bool(spec["gradients"]),
    )
    if spec["gradients"]:
        torch.save(found["gradients"], spec["gradients"])
    return {"cpu_s": found["cpu_s"], "positions": found["positions"], "peak_mib": _peak_mib()}


def _peak_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _print_table(title: str, found: dict[str, dict[str, Any]]) -> None:
    first = next(iter(found.values()))
    print(f"\n{title}\n")
    print("| variant | positions | CPU s | faster | peak memory, MiB | share | gradient distance |")
    print("|---|---|---|---|---|---|---|")
    for variant, row in found.items():
        note = " **differs**" if row["differs"] else ""
        print(
            f"| {variant} | {row['positions']:,} | {row['cpu_s']:.2f} | {first['cpu_s'] / row['cpu_s']:.1f}x "
            f"| {row['peak_mib']:,.0f} | {row['peak_mib'] / first['peak_mib']:.2f} | {row['distance']:.1e}{note} |"
        )
    sys.stdout.flush()


def run_growth(args: argparse.Namespace) -> None:
    """CPU seconds against turns (step-wise) and samples (single turn), for three layouts."""
    from update_plot import draw_growth

    turns, samples = [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32]
    curves: dict[str, dict[str, list[tuple[int, float, int]]]] = {"turns": {}, "samples": {}}
    for name, kind, counts in (("turns", "step", turns), ("samples", "single", samples)):
        for variant in ("padded", "packed", "shared"):
            for count in counts:
                work = (
                    {"prompts": 1, "samples": 2, "turns": count}
                    if name == "turns"
                    else {"prompts": 1, "samples": count}
                )
                spec = {
                    "model": args.model,
                    "kind": kind,
                    "variant": variant,
                    "steps": args.steps,
                    "untimed": 1,
                    "tokens": args.tokens,
                    "bf16": False,
                    "gradients": "",
                    "work": work,
                }
                found = _measure(spec, args.json)
                point = (count, statistics.median(found["cpu_s"]), found["positions"])
                curves[name].setdefault(variant, []).append(point)
                print(name, variant, *point, flush=True)
    draw_growth(curves, Path(args.plot))


def run_head(args: argparse.Namespace) -> None:
    """Time and memory of the output head, its loss and its gradients."""
    print("| way | tokens | vocabulary | CPU s | memory, MiB |\n|---|---|---|---|---|")
    for tokens in map(int, args.tokens.split(",")):
        for way in ("full", "tiled", "fused"):
            code = f"from update_head import measure; measure({way!r}, {tokens}, {args.hidden}, {args.vocabulary})"
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(sys.path[:2]),
                    "MALLOC_MMAP_THRESHOLD_": "65536",
                },
                capture_output=True,
                text=True,
                timeout=3600,
            )
            print(done.stdout.strip() or done.stderr[-500:], flush=True)


if __name__ == "__main__":
    main()
