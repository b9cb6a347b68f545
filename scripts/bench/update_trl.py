"""TRL's own GRPOTrainer on the rollouts of `update_work.py`: unmodified, fed through its `rollout_func`.

Needs `pip install trl==1.16`. The update of a step is what lies between its start and its end, less the time inside
`_generate_and_score_completions`. `merged` gives it its native multi-turn form, one masked row per trajectory.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from update_work import EOS, PAD, Conversation, ModelSize, build_model

NOTHING_BESIDE: dict[str, Any] = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Settings of each of its trainers here: steps on a CPU at one rate, and nothing beside them."""


def run(
    size: ModelSize,
    conversations: list[Conversation],
    *,
    merged: bool,
    steps: int,
    untimed: int,
    tokens: int,  # noqa: ARG001  (it counts rows)
    rows_per_micro_batch: int = 8,
    bf16: bool = False,
    keep_gradients: bool = False,
) -> dict[str, Any]:
    """`cpu_s` of each timed update, `positions` computed, and `gradients` of the first where asked for."""
    from datasets import Dataset
    from trl import GRPOTrainer

    entries: dict[int, list[tuple[list[int], list[int], list[int], float]]] = {}
    for conversation in conversations:
        mine = entries.setdefault(conversation.prompt, [])
        if merged:
            mine.append((*conversation.merged(), conversation.advantage))
        else:
            mine += [(c, response, [1] * len(response), conversation.advantage) for c, response in conversation.rows()]
    num_rows = sum(map(len, entries.values()))
    rows_per_micro_batch = min(rows_per_micro_batch, num_rows)
    texts = {prompt: f"t{prompt + 8}" for prompt in entries}
    prompt_of = {text: prompt for prompt, text in texts.items()}

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        taken = dict.fromkeys(entries, 0)
        columns: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "fixed": []}
        masks = []
        for text in prompts:
            prompt = prompt_of[text]
            context, response, mask, advantage = entries[prompt][taken[prompt]]
            taken[prompt] += 1
            columns["prompt_ids"].append(context)
            columns["completion_ids"].append(response)
            columns["logprobs"].append([0.0] * len(response))
            columns["fixed"].append(advantage)
            masks.append(mask)
        return {**columns, "env_mask": masks} if merged else columns

    def reward(*, fixed: list[float], **_: Any) -> list[float]:
        return list(fixed)

    probe = _Probe(keep_gradients)
    trainer = GRPOTrainer(
        model=build_model(size),
        reward_funcs=reward,
        args=_settings(
            bf16=bf16,
            per_device_train_batch_size=rows_per_micro_batch,
            gradient_accumulation_steps=num_rows // rows_per_micro_batch,
            num_generations=len(next(iter(entries.values()))),
            max_steps=untimed + steps,
        ),
        train_dataset=Dataset.from_list([{"prompt": texts[prompt]} for prompt in sorted(texts)]),
        processing_class=tokenizer(size),
        callbacks=[probe.callback()],
        rollout_func=rollout,
    )
    probe.watch(trainer)
    trainer.train()
    return {
        "cpu_s": probe.update_s[untimed:],
        "positions": probe.positions,
        "gradients": probe.gradients,
    }


def _settings(**sizes: Any) -> Any:
    """The loss that all variants compute, and nothing beside the update."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench_trl"),
        beta=0.0,
        temperature=1.0,
        scale_rewards="none",
        loss_type="dapo",
        shuffle_dataset=False,
        learning_rate=1e-6,
        logging_steps=1000,
        **NOTHING_BESIDE,
        **sizes,
    )


class _Probe:
    """Clocks around the trainer's steps."""

    def __init__(self, keep_gradients: bool) -> None:
        self.update_s: list[float] = []
        self.positions = 0
        self.gradients: dict[str, Any] = {}
        self._keep_gradients = keep_gradients
        self._started = self._preparing = 0.0

    def watch(self, trainer: Any) -> None:
        inner = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            start = time.process_time()
            output = inner(inputs)
            self._preparing += time.process_time() - start
            self.positions = output["prompt_ids"].numel() + output["completion_ids"].numel()
            return output

        trainer._generate_and_score_completions = timed
        accelerator, clip = trainer.accelerator, trainer.accelerator.clip_grad_norm_

        def clip_after_a_look(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self._keep_gradients and not self.gradients:
                named = trainer.model.named_parameters()
                self.gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
            return clip(parameters, *args, **kwargs)

        accelerator.clip_grad_norm_ = clip_after_a_look

    def callback(self) -> Any:
        from transformers import TrainerCallback

        probe = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                probe._started, probe._preparing = time.process_time(), 0.0

            def on_step_end(self, *_: Any, **__: Any) -> None:
                probe.update_s.append(time.process_time() - probe._started - probe._preparing)

        return Callback()


def tokenizer(size: ModelSize) -> Any:
    """Whose text "t17 t4" is the tokens 17 and 4."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{index}": index for index in range(size.vocabulary)}
    words["<pad>"], words["<eos>"] = words.pop(f"t{PAD}"), words.pop(f"t{EOS}")
    raw = Tokenizer(models.WordLevel(words, unk_token="t3"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left")
