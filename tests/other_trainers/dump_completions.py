"""Makes `dumps/`: the completions that TRL and verl themselves write, small enough to be kept here.

    python tests/other_trainers/dump_completions.py trl FOLDER
    PYTHONPATH=VERL python tests/other_trainers/dump_completions.py verl FOLDER

TRL's GRPOTrainer trains the bundled model for two steps on a CPU, with two reward functions (`pip install trl==1.16`). verl
needs GPUs to train: its trainer dumps rows that it did not sample, by `_log_rollout_data`, which its steps call (the wheel
verl-0.9.1, unpacked in VERL; `pip install tensordict torchdata codetiming pylatexenc pyvers orjson cloudpickle`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[2] / "skyrl_train/data/assets/tiny_qwen2"
ROWS = (
    ("What is 2+3?", "5", ("2+3=5\n#### 5", "#### 6")),
    ("What is 4*3?", "12", ("4*3=12\n#### 12", "<b>twelve</b>")),
)


def dump_trl(folder: Path) -> None:
    """Write `completions/completions_00001.parquet` and that of step 2."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def ends(completions: list[Any], **_: Any) -> list[float]:
        return [float(completion[0]["content"].strip()[-1:].isdigit()) for completion in completions]

    def short_reward(completions: list[Any], **_: Any) -> list[float]:
        return [1.0 / (1 + len(completion[0]["content"])) for completion in completions]

    settings = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        log_completions=True,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        seed=0,
    )
    prompts = [[{"role": "user", "content": f"What is {number} + {number + 1}?"}] for number in range(4)]
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL),
        reward_funcs=[ends, short_reward],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    ).train()


def dump_verl(folder: Path) -> None:
    """Write `1.jsonl` and `2.jsonl`."""
    import numpy as np
    import torch
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer._init_dump_executor()

    def ids(texts: list[str], side: str) -> Any:
        trainer.tokenizer.padding_side = side
        return trainer.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).input_ids

    rows = [(question, truth, text) for question, truth, texts in ROWS for text in texts]
    chats = [
        trainer.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question, _, _ in rows
    ]
    responses = ids([text for _, _, text in rows], "right")
    right = [float(text.endswith(f"#### {truth}")) for _, truth, text in rows]
    scores = torch.zeros(responses.shape)
    scores[:, -1] = torch.tensor(right)
    truths = np.array([{"ground_truth": truth, "style": "rule"} for _, truth, _ in rows], dtype=object)
    for step in (1, 2):
        batch = DataProto.from_dict(
            tensors={"prompts": ids(chats, "left"), "responses": responses, "token_level_scores": scores},
            non_tensors={"reward_model": truths},
        )
        trainer.global_steps = step
        trainer._log_rollout_data(batch, {"acc": np.array(right) > 0}, {}, str(folder))
    trainer._shutdown_dump_executor()


if __name__ == "__main__":
    {"trl": dump_trl, "verl": dump_verl}[sys.argv[1]](Path(sys.argv[2]))
