"""TRL's own GRPOTrainer on the steps of `step.py`: unmodified; with two turns through its `rollout_func`.

    python scripts/bench/step_trl.py TURNS SEED STEPS [vllm]

One turn is the trainer as it is, with a reward function. Its built-in turns are calls of tools, which these conversations do
not have: for the second one `rollout_func` answers with the environment and generates again by the trainer's own method.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from step import LEARNING_RATE, MOST_TOKENS, PROMPTS, SAMPLES, tick
from update_trl import NOTHING_BESIDE

from skyrl_train.data.tasks import RETRY_MESSAGE
from skyrl_train.model import resolve_model_path
from skyrl_train.rollout.envs import WordProblemsEnv

RETRY = f"\n<|im_start|>user\n{RETRY_MESSAGE}<|im_end|>\n<|im_start|>assistant\n"
"""What the chat template puts between a wrong answer and the next one."""
ROWS_PER_FORWARD = 32


def train(turns: int, seed: int, steps: int, vllm: bool) -> None:
    """Train, with a tick of the clock after each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from skyrl_train.data.tasks import Split, generate_problems, to_row

    torch.set_num_threads(1)
    folder = resolve_model_path("builtin:tiny_qwen2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [to_row(problem, Split.TRAIN, i) for i, problem in enumerate(generate_problems(Split.TRAIN, 2048, 0))]
    conversations = Conversations(tokenizer, rows, turns)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=conversations.reward,
        args=settings(seed, steps, vllm),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        rollout_func=conversations.rollout if turns > 1 else None,
        callbacks=[clock(conversations)],
    )
    trainer.train()


class Conversations:
    """The word problems as TRL asks for them."""

    def __init__(self, tokenizer: Any, rows: list[dict[str, Any]], turns: int) -> None:
        self._tokenizer, self._turns = tokenizer, turns
        self._row_of = {row["prompt"][-1]["content"]: row for row in rows}
        self._retry_ids = tokenizer(RETRY, add_special_tokens=False)["input_ids"]
        self.rewards: list[float] = []
        self.tokens: list[int] = []

    def reward(
        self, *, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **extra: Any
    ) -> list[float]:
        """A reward for each completion: of the rollout where there are two turns."""
        given = extra.get("conversation_reward")
        if given is None:
            texts = [completion[-1]["content"] for completion in completions]
            given = [self._environment(prompt).step(text)["reward"] for prompt, text in zip(prompts, texts)]
            self.tokens = [len(ids) for ids in completion_ids]
        self.rewards = list(given)
        return self.rewards

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Both turns of each conversation, in rows whose mask says what was sampled."""
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        environments = [self._environment(prompt) for prompt in prompts]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        rewards = [0.0] * len(prompts)
        running = list(range(len(prompts)))
        while running:
            contexts = [prompt_ids[place] + completions[place] for place in running]
            responses, _ = trainer._generate_single_turn(contexts, None, {}, SAMPLES)
            texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
            going_on = []
            for place, response, text in zip(running, responses, texts):
                completions[place] += response
                masks[place] += [1] * len(response)
                answer = environments[place].step(text)
                rewards[place] += answer["reward"]
                if not answer["done"]:
                    ended = response[-1] == self._tokenizer.eos_token_id
                    between = self._retry_ids if ended else [self._tokenizer.eos_token_id, *self._retry_ids]
                    completions[place] += between
                    masks[place] += [0] * len(between)
                    going_on.append(place)
            running = going_on
        self.tokens = [sum(mask) for mask in masks]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
            "conversation_reward": rewards,
        }

    def _environment(self, prompt: list[dict[str, str]]) -> WordProblemsEnv:
        return WordProblemsEnv(extras={**self._row_of[prompt[-1]["content"]], "max_turns": self._turns})


def settings(seed: int, steps: int, vllm: bool) -> Any:
    """Two optimizer steps for each batch of rollouts, and nothing beside them."""
    from trl import GRPOConfig

    rows = PROMPTS * SAMPLES // 2
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench_trl"),
        seed=seed,
        max_steps=2 * steps,
        per_device_train_batch_size=ROWS_PER_FORWARD,
        gradient_accumulation_steps=rows // ROWS_PER_FORWARD,
        generation_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=MOST_TOKENS,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        scale_rewards="group",
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        logging_steps=2,
        **NOTHING_BESIDE,
        **({"use_vllm": True, "vllm_mode": "colocate"} if vllm else {}),
    )


def clock(conversations: Conversations) -> Any:
    """A callback that ticks at the start and after each second optimizer step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            tick()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % 2 == 0:
                rewards, tokens = conversations.rewards, conversations.tokens
                tick(reward=sum(rewards) / len(rewards), tokens=sum(tokens) / len(tokens))

    return Clock()


if __name__ == "__main__":
    train(*map(int, sys.argv[1:4]), vllm=sys.argv[4:] == ["vllm"])
