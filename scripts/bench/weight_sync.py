"""Time of a weight sync against the size of the model: learners on Ray, vLLM engines on Ray, models with random weights.

    python scripts/bench/weight_sync.py                           # 4, 100 and 500 MB; two FSDP2 ranks, one engine
    python scripts/bench/weight_sync.py --megabytes 4 --ranks 1 --syncs 3
    python scripts/bench/weight_sync.py --device cuda             # a rank and an engine on each GPU, through CUDA IPC
    python scripts/bench/weight_sync.py --device cuda --apart     # half of the GPUs train, half generate: NCCL
    python scripts/bench/weight_sync.py --device cuda --tensor-parallel 2 --megabytes 3000 15000
    python scripts/bench/weight_sync.py --in-process              # what packing and unpacking cost, against a memory copy
    python scripts/bench/weight_sync.py --driver 8 64 512         # what the driver does, with so many fake ranks and engines

Prints a row per size: bytes that travelled, the first sync, the median and the longest of the later ones, and GB/s of the
median. A model of so many megabytes in float32 travels as half of them where engines compute in bfloat16, as they do on
GPUs unless `--dtype` says otherwise.

`--in-process` starts nothing: on one thread and in turns, a copy of the bytes that travel into memory that is there, packing
them and unpacking them, as a rank and a worker of vLLM do (`RankSender.carry_part`, `Arrivals`), of one rank that has all
and of two that have half of each matrix; CPU seconds, medians, and each as a multiple of the copy.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import update_work
from update_work import ModelSize

from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.models import (
    GeneratorConfig,
    ModelConfig,
    PlacementConfig,
    PlatformConfig,
    StrategyConfig,
    VLLMConfig,
)
from skyrl_train.config.rules import ENGINE_PLACEMENT_RULES, ENGINE_RULES, PLACEMENT_RULES, run_rules

VOCABULARY = 4096
_WIDTHS = {4: 128, 100: 640, 500: 1280, 3000: 2048, 15000: 3584}
"""Megabytes of float32 to hidden size; other sizes take the nearest width and as many layers as it needs."""
_DEFAULT_MEGABYTES = {"cpu": [4, 100, 500], "cuda": [500, 3000]}


def save_model(folder: Path, megabytes: int) -> int:
    """A Qwen2 with random weights of about that size, with a tokenizer; returns its bytes."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    width = _WIDTHS[min(_WIDTHS, key=lambda known: abs(known - megabytes))]
    hidden = 4 * width
    bytes_per_layer = 4 * (3 * width * hidden + 2 * width * width + width * width)
    layers = max(1, round((megabytes * 1e6 - 4 * VOCABULARY * width) / bytes_per_layer))
    size = ModelSize(width, layers, width // 64, max(1, width // 128), hidden, VOCABULARY)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3", eos_token="w2", pad_token="w0")
    tokenizer.save_pretrained(folder)
    return update_work.save_model(folder, size, max_position_embeddings=512, bos_token_id=1)


def make_config(folder: Path, args: argparse.Namespace) -> Config:
    """For the model in `folder`. On GPUs ranks and engines share all of them, or have half of them each."""
    cuda = args.device == "cuda"
    ranks = args.ranks or (_count_gpus() // (1 + args.apart) if cuda else 2)
    engines = args.engines or (max(1, ranks // args.tensor_parallel) if cuda else 1)
    vllm = VLLMConfig(num_engines=engines, tensor_parallel_size=args.tensor_parallel)
    return Config(
        output_dir=str(folder / "run"),
        platform=PlatformConfig(name="gpu", device="cuda:0") if cuda else PlatformConfig(),
        model=ModelConfig(path=str(folder), dtype=args.dtype or ("bfloat16" if cuda else "float32")),
        trainer=TrainerConfig(total_steps=1),
        strategy=StrategyConfig(name="fsdp2" if ranks > 1 else "single"),
        placement=PlacementConfig(
            backend="ray", policy_num_workers=ranks, start_timeout_s=900.0, colocate_all=cuda and not args.apart
        ),
        generator=GeneratorConfig(backend="vllm", max_context_length=256, vllm=vllm, weight_transport=args.transport),
    )


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def measure(config: Config, *, syncs: int) -> list[dict[str, Any]]:
    """The records of so many syncs, in order."""
    from skyrl_train.config.derived import run_models
    from skyrl_train.plan import plan_batches
    from skyrl_train.runs.construction import build_host, build_learners

    output = Path(config.output_dir)
    output.mkdir()
    with ExitStack() as stack:
        host = build_host(config, stack)
        assert host.engines is not None
        plan = plan_batches(config, num_train_prompts=64)
        policy = build_learners(run_models(config, plan.schedule), stack, host).policy
        for version in range(syncs):
            host.engines.transport.sync(policy.weights(), version)
    lines = (output / "weight_sync.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--megabytes", type=int, nargs="+", help="of float32; 4 100 500 on a CPU, 500 3000 on GPUs")
    parser.add_argument("--ranks", type=int, help="of the policy: FSDP2 where more than one; 2, or one a GPU")
    parser.add_argument("--engines", type=int, help="1, or as many as their GPUs hold")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices of an engine")
    parser.add_argument("--apart", action="store_true", help="ranks and engines share no GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the engines; bfloat16 on GPUs")
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--in-process", action="store_true", help="packing and unpacking alone")
    parser.add_argument("--rounds", type=int, default=9, help="with --in-process")
    parser.add_argument("--transport", default="auto", help="generator.weight_transport")
    parser.add_argument(
        "--driver", type=int, nargs="+", help="the driver alone, with fakes: ranks, and as many engines"
    )
    args = parser.parse_args(argv)
    if args.driver:
        from weight_driver import measure_driver

        titles = ("ranks, and engines", "meeting, CPU s", "MB pickled", "each sync, CPU s", "MB pickled", "calls")
        table = harness.Table(*titles, title="A 7B model by broadcast, the driver's part")
        for count in args.driver:
            (first, met, _), *others = measure_driver(count, syncs=args.syncs)
            middle = statistics.median(seconds for seconds, _, _ in others)
            num_bytes, calls = others[-1][1:]
            table.row(count, f"{first:.2f}", f"{met / 1e6:.1f}", f"{middle:.4f}", f"{num_bytes / 1e6:.2f}", calls)
        return
    if args.device == "cuda" and _count_gpus() < 1 + args.apart:
        parser.error(f"--device cuda finds {_count_gpus()} GPUs and needs {1 + args.apart}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if args.in_process:
        table = harness.Table(
            *("type that travels", "ranks", "MB", "copy, ms", "pack, ms", "unpack, ms", "pack / copy", "unpack / copy"),
            "both",
        )
        for megabytes in args.megabytes or _DEFAULT_MEGABYTES["cpu"]:
            for dtype in ("float32", "bfloat16"):
                for ranks in (1, 2):
                    table.row(dtype, ranks, *measure_in_process(megabytes, dtype, ranks, args.rounds))
        return
    sizes = args.megabytes or _DEFAULT_MEGABYTES[args.device]
    for megabytes in sizes:
        with tempfile.TemporaryDirectory(prefix="bench-weight-sync-") as scratch:
            save_model(Path(scratch), megabytes)
            config = make_config(Path(scratch), args)
            if violations := list(run_rules(config, (*PLACEMENT_RULES, *ENGINE_PLACEMENT_RULES, *ENGINE_RULES))):
                parser.error("; ".join(str(violation) for violation in violations))
            if megabytes == sizes[0]:
                table = table_of(config)
            first, *others = measure(config, syncs=args.syncs)
            table.row(*_cells(first, others or [first]))


def measure_in_process(megabytes: int, dtype: str, ranks: int, rounds: int) -> list[str]:
    """Return the last cells of a row: a model of so many megabytes of float32 that travels in `dtype` from so many ranks."""
    import torch

    from skyrl_train.weight_sync import Arrivals, Entry, pack_part
    from skyrl_train.weights import Bucket, Memory, Piece, bucket_names, carried_bytes, size_of

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), megabytes)
        from skyrl_train.model import load_causal_lm

        parameters = {
            name: each.detach() for name, each in load_causal_lm(ModelConfig(path=folder), "cpu").named_parameters()
        }
    types = {name: dtype if each.ndim > 1 else "float32" for name, each in parameters.items()}
    planned = [
        Bucket(
            names=names,
            dtypes=tuple(types[name] for name in names),
            shapes=tuple(tuple(parameters[name].shape) for name in names),
        )
        for names in bucket_names([(name, size_of(types[name], each.shape)) for name, each in parameters.items()])
    ]
    memories = [Memory() for _ in range(ranks)]

    def parts_of(bucket: Bucket) -> list[Bucket]:
        sent = []
        for rank, memory in enumerate(memories):
            entries = []
            for name in bucket.names:
                whole = parameters[name]
                box = whole.chunk(ranks)[rank] if len(whole) >= ranks else whole[: len(whole) * (rank == 0)]
                piece = Piece((rank * -(-len(whole) // ranks),) + (0,) * (whole.ndim - 1), tuple(whole.shape))
                entries.append(Entry(name=name, box=box, piece=piece, dtype=getattr(torch, types[name])))
            part, flat = pack_part(entries, bucket, cpu, memory)
            sent.append(replace(part, data=flat.numpy()))
        return sent

    bytes_ = [torch.randint(0, 256, (bucket.num_bytes,), dtype=torch.uint8) for bucket in planned]
    copies = [each.clone() for each in bytes_]
    arrivals = Arrivals()
    seconds: dict[str, list[float]] = {"copy": [], "pack": [], "unpack": []}
    for _ in range(rounds + 1):
        took = dict.fromkeys(seconds, 0.0)
        arrivals.begin()
        for bucket, source, target in zip(planned, bytes_, copies):
            started = time.process_time()
            target.copy_(source)
            is_copied = time.process_time()
            parts = parts_of(bucket)
            packed = time.process_time()
            for _ in arrivals.take(replace(bucket, parts=tuple(parts)), carried_bytes):
                pass
            took["unpack"] += time.process_time() - packed
            took["copy"] += is_copied - started
            took["pack"] += packed - is_copied
        for name, one in took.items():
            seconds[name].append(one)
    copy, pack, unpack = (statistics.median(each[1:]) for each in seconds.values())  # the first takes its memory
    travels = sum(bucket.num_bytes for bucket in planned) / 1e6
    ratios = [f"{pack / copy:.1f}", f"{unpack / copy:.1f}", f"**{(pack + unpack) / copy:.1f}**"]
    return [f"{travels:.0f}", *(f"{1e3 * each:.1f}" for each in (copy, pack, unpack)), *ratios]


def table_of(config: Config) -> harness.Table:
    vllm, placement = config.generator.vllm, config.placement
    shared = "on the same devices" if placement.colocate_all else "apart"
    return harness.Table(
        *("MB that travel", "first sync", "median of the others", "longest of the others", "GB/s"),
        title=f"{placement.policy_num_workers} ranks and {vllm.num_engines} engines of {vllm.tensor_parallel_size} "
        f"{shared}, {config.platform.name}, engines in {config.model.dtype}; seconds",
    )


def _cells(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    seconds = [record["seconds"] for record in others]
    middle, num_bytes = statistics.median(seconds), first["num_bytes"]
    numbers = (first["seconds"], middle, max(seconds), num_bytes / 1e9 / middle)
    return [f"{num_bytes / 1e6:.0f}", *(f"{number:.2f}" for number in numbers)]


if __name__ == "__main__":
    harness.run(main)
