"""verl's own engine on the rollouts of `update_work.py`: `FSDPEngineWithLMHead.train_batch` with `ppo_loss`, one process.

verl knows no CPU, so one is made known through its registry of platforms; the engine, its dynamic micro-batches, loss,
clipping and optimizer are the installed package's. `packed`: its `use_remove_padding`, one row of all sequences, which
without FlashAttention gets its block mask from transformers.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from update_work import PAD, Conversation, ModelSize, build_model


def run(
    size: ModelSize,
    conversations: list[Conversation],
    *,
    packed: bool,
    steps: int,
    untimed: int,
    tokens: int,
    bf16: bool = False,
    keep_gradients: bool = False,
) -> dict[str, Any]:
    """`cpu_s` of each timed update, `positions` computed, and `gradients` of the first where asked for."""
    _add_cpu_platform()
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    rows = [(context, response, c.advantage) for c in conversations for context, response in c.rows()]
    # Of dynamic micro-batches each has room for the longest row, or is refused.
    tokens = max(tokens, *(len(context) + len(response) for context, response, _ in rows))
    engine = _engine(size, packed=packed, tokens=tokens, bf16=bf16)
    settings = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=len(rows),
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        loss_agg_mode="token-mean",
        entropy_coeff=0.0,
    )
    with engine.eval_mode():
        scored = engine.infer_batch(_batch(rows, None, packed=packed, tokens=tokens))["model_output"]["log_probs"]
    old = [
        row[len(context) - 1 : len(context) + len(response) - 1].float()
        for row, (context, response, _) in zip(scored.unbind(), rows)
    ]
    probe = _Probe(engine, keep_gradients)
    seconds: list[float] = []
    with engine.train_mode():
        for number in range(untimed + steps):
            batch = _batch(rows, old, packed=packed, tokens=tokens)
            probe.positions = 0
            start = time.process_time()
            engine.train_batch(batch, partial(ppo_loss, config=settings))
            if number >= untimed:
                seconds.append(time.process_time() - start)
    torch.distributed.destroy_process_group()
    return {"cpu_s": seconds, "positions": probe.positions, "gradients": probe.gradients}


class _Probe:
    """Looks at what goes into the model, and at the gradients before they are clipped."""

    def __init__(self, engine: Any, keep_gradients: bool) -> None:
        self.positions = 0
        self.gradients: dict[str, Tensor] = {}
        prepare, step = engine.prepare_model_inputs, engine.optimizer_step

        def prepare_and_count(*args: Any, **kwargs: Any) -> Any:
            found = prepare(*args, **kwargs)
            self.positions += found[0]["input_ids"].numel()
            return found

        def look_and_step() -> Any:
            if keep_gradients and not self.gradients:
                named = ((name, p.grad) for name, p in engine.module.named_parameters())
                self.gradients = {name: _whole(grad) for name, grad in named if grad is not None}
            return step()

        engine.prepare_model_inputs, engine.optimizer_step = prepare_and_count, look_and_step


def _whole(gradient: Any) -> Tensor:
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().clone()


def _engine(size: ModelSize, *, packed: bool, tokens: int, bf16: bool) -> Any:
    from update_trl import tokenizer
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    folder = tempfile.mkdtemp(prefix="bench_verl")
    build_model(size).save_pretrained(folder)
    tokenizer(size).save_pretrained(folder)
    reduced = "bf16" if bf16 else "fp32"
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=folder,
            use_remove_padding=packed,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision={"param_dtype": reduced, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            use_remove_padding=packed,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=tokens,
        ),
        FSDPOptimizerConfig(lr=1e-6, weight_decay=0.0, clip_grad=1.0, total_training_steps=100),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def _batch(
    rows: list[tuple[list[int], list[int], float]], old: list[Tensor] | None, *, packed: bool, tokens: int
) -> Any:
    """What its trainer hands to the engine: jagged tensors of one row for each sequence."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    def jagged(sequences: list[Tensor]) -> Tensor:
        found: Tensor = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
        return found

    responses = [torch.tensor(response) for _, response, _ in rows]
    ids = [torch.tensor(context + response) for context, response, _ in rows]
    batch = TensorDict(
        {
            "input_ids": jagged(ids),
            "position_ids": jagged([torch.arange(len(row)) for row in ids]),
            "prompts": jagged([torch.tensor(context) for context, _, _ in rows]),
            "responses": jagged(responses),
            "loss_mask": jagged([torch.ones_like(response) for response in responses]),
            "response_mask": jagged([torch.ones_like(response) for response in responses]),
            "advantages": jagged([torch.full((len(response),), advantage) for _, response, advantage in rows]),
            "old_log_probs": jagged(old or [torch.zeros(len(response)) for response in responses]),
        },
        batch_size=[len(rows)],
    )
    tensordict_utils.assign_non_tensor(
        batch,
        use_remove_padding=packed,
        pad_mode=DatasetPadMode.NO_PADDING,
        pad_token_id=PAD,
        temperature=1.0,
        calculate_entropy=True,
        use_fused_kernels=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=tokens,
        global_batch_size=len(rows),
    )
    return batch


def _add_cpu_platform() -> None:
    """A platform whose device calls do nothing, save those that say what the device is."""
    from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

    def nothing(*_: Any, **__: Any) -> None: ...

    stated: dict[str, Any] = {
        "device_name": "cpu",
        "vendor_name": "cpu",
        "device_module": torch.cpu,
        "is_available": lambda *_: True,
        "current_device": lambda *_: "cpu",
        "device_count": lambda *_: 1,
        "get_device_capability": lambda *_: (None, None),
        "communication_backend_name": lambda *_: "gloo",
        "visible_devices_envvar": lambda *_: "NO_VISIBLE_DEVICES",
        "nvtx_range": lambda *_: nullcontext(),
        "ray_resource_name": lambda *_: "CPU",
        "ray_noset_envvars": lambda *_: [],
        "is_ipc_supported": lambda *_: False,
    }
    others = dict.fromkeys(PlatformBase.__abstractmethods__ - stated.keys(), nothing)
    platform: Any = type("CpuPlatform", (PlatformBase,), {**others, **stated})
    PlatformRegistry.register(platform="cpu")(platform)
    set_platform(platform())
