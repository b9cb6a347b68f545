"""What tenants of `skyrl-serve` gain by being served together: samples and training passes of several adapters on one base,
all at once against one tenant after the other, and the memory that it takes.

    python scripts/bench/serve.py                       # SmolLM2 135M, eight tenants, prompts of 256 tokens
    python scripts/bench/serve.py --tenants 4 --new-tokens 32 model.path=...

Each side is a process of its own, and sides take turns. Times are CPU seconds, since a server waits for nothing but its
processor; `gain` is what one after the other takes over what all at once takes. Memory is the peak of the side, beside what
the process holds with the base loaded.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import harness

PARTS = ("sampling", "training")


def main(words: Sequence[str]) -> int | None:
    """Measure both sides in turns and print their rates."""
    parser = harness.arguments(__doc__)
    parser.add_argument("settings", nargs="*", default=["model=smollm2_135m"])
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=1, help="of each tenant's prompt")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("alone", "together"), help="measure this one in this process")
    args = parser.parse_intermixed_args(words)
    if args.side:
        print(json.dumps(asyncio.run(_side(args))))
        return None
    own = [f"--{name.replace('_', '-')}={value}" for name, value in vars(args).items() if isinstance(value, int)]

    def measure(side: str, _: int) -> Any:
        return harness.answer(harness.apart([__file__, *args.settings, *own, f"--side={side}"]))

    found, failed = harness.in_turns(("alone", "together"), range(args.rounds), measure)
    if failed:
        raise harness.MeasurementError(str(failed))
    title = (
        f"{args.tenants} tenants, prompts of {args.prompt_tokens} tokens, {args.new_tokens} new ones, rank {args.rank}"
    )
    table = harness.Table("", "one after the other, CPU s", "together, CPU s", "tokens/s together", "gain", title=title)
    for part in PARTS:
        alone, together = (min(each[part] for each in found[side]) for side in ("alone", "together"))
        tokens = found["together"][0][f"{part}_tokens"]
        table.row(part, f"{alone:.2f}", f"{together:.2f}", f"{tokens / together:.0f}", f"{alone / together:.2f}")
    memory = harness.Table("side", "with the base, MiB", "adapters, MiB", "peak, MiB", "over base and adapters")
    for side in found:
        base, adapters, peak = (max(each[name] for each in found[side]) for name in ("base", "adapters", "peak"))
        memory.row(side, f"{base:.0f}", f"{adapters:.0f}", f"{peak:.0f}", f"{peak / (base + adapters) - 1:+.1%}")
    return None


async def _side(args: Any) -> dict[str, float]:
    from skyrl_train import load_config
    from skyrl_train.config.derived import learner_settings
    from skyrl_train.serve import Models, Service

    with tempfile.TemporaryDirectory() as name:
        config = load_config(
            "generator.sampling.temperature=1.0",
            *args.settings,
            f"generator.max_batch_size={max(64, args.tenants * args.samples)}",
            settings={"output_dir": name},
        )
        models = Models(learner_settings(config, "policy"), config.generator)
        base = _now_mib()
        service = Service({"local/base": models}, Path(name), seed=0)
        await service.start()
        tenants = [Tenant(service, number, args) for number in range(args.tenants)]
        for each in tenants:
            await each.begin()
        weights = [models.learners.tensors(each.name).values() for each in service.records.models.values()]
        num_bytes = sum(tensor.nbytes for adapter in weights for tensor in adapter)
        # weights, gradient and two moments of the learner's, and the engine's copy of the weights
        found = {"base": base, "adapters": 5 * num_bytes / 2**20}
        works: dict[str, Callable[[Tenant], Awaitable[int]]] = {"sampling": Tenant.sample, "training": Tenant.train}
        for part, work in works.items():
            for each in tenants:  # what is made once: the engine has each tenant's adapter from here on
                await work(each)
            began = time.process_time()
            if args.side == "together":
                counts = await asyncio.gather(*map(work, tenants))
            else:
                counts = [await work(each) for each in tenants]
            found |= {part: time.process_time() - began, f"{part}_tokens": sum(counts)}
        await service.close()
        return {**found, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


class Tenant:
    """A client of the service, without HTTP."""

    def __init__(self, service: Any, number: int, args: Any) -> None:
        self._service, self._name, self._args = service, f"tenant-{number}", args
        self._tokens = [3 + (7 * number + 11 * index) % 97 for index in range(args.prompt_tokens)]
        self._seq = self._num_sampled = 0

    async def begin(self) -> None:
        """Have an adapter that is unlike the others, and a sampler of it."""
        session = (await self._service.create_session(self._name, {}))["session_id"]
        lora = {"rank": self._args.rank, "seed": 1}
        made = {"session_id": session, "model_seq_id": 0, "base_model": "local/base", "lora_config": lora}
        self._model = (await self._done(self._service.create_model(self._name, made)))["json"]["model_id"]
        await self.train()
        await self._verb("optim_step", {"learning_rate": 1e-2})
        saved = await self._verb("save_weights_for_sampler", {"sampling_session_seq_id": 0})
        self._sampler = saved["json"]["sampling_session_id"]

    async def train(self) -> int:
        """One pass with a gradient over the prompt; returns its tokens."""
        from tests.support.serve_cases import as_message, datum

        message = as_message(self._model, 1, [datum(self._tokens)])
        await self._verb("forward_backward", {}, message.SerializeToString())
        return len(self._tokens)

    async def sample(self) -> int:
        """Samples of the prompt, never stopped early; returns their tokens."""
        asked = {
            "sampling_session_id": self._sampler,
            "seq_id": self._num_sampled,
            "prompt": {"chunks": [{"tokens": self._tokens}]},
            "num_samples": self._args.samples,
            "sampling_params": {"max_tokens": self._args.new_tokens, "seed": 1, "stop": []},
        }
        self._num_sampled += 1
        await self._done(self._service.sample(self._name, asked))
        return int(self._args.new_tokens * self._args.samples)

    async def _verb(self, verb: str, content: dict[str, Any], body: bytes = b"") -> Any:
        self._seq += 1
        return await self._done(self._service.submit(self._name, verb, self._model, self._seq, content, body))

    async def _done(self, promise: Awaitable[Any]) -> Any:
        request_id = (await promise)["request_id"]
        outcome = await self._service.retrieve(self._name, request_id, timeout_s=harness.SIDE_DEADLINE_S)
        assert "error" not in outcome, outcome
        return outcome


def _now_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    harness.run(main)
