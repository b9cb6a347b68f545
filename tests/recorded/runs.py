"""The runs that are recorded: commands as a user types them, one after the other, each in a folder of its own.

What a run reads beside the bundled model and data is made once for both sides, by the code of this checkout. Settings are
those that both commits know; where one was renamed between them, the run is left out on the side that refuses it, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.tool_cases import model_with_tools
from tests.support.vision_runs import save_model, write_rows

RL = (
    *(
        "skyrl_train.main",
        "+experiment=gsm8k_multiturn",
        "platform=cpu",
        "data.max_train_prompts=16",
        "data.validation=[]",
    ),
    *("generator.n_samples_per_prompt=4", "generator.sampling.max_generate_length=24", "trainer.total_steps=2"),
    *("trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2", "trainer.critic_mini_batch_size=2"),
    *("trainer.ckpt_interval=1", "environment.num_workers=1", "trainer.look=off", "tracker=[]"),
)
SFT = (
    *("skyrl_train.main_sft", "+experiment=sft_gsm8k", "sft_platform=cpu", "data.max_train_rows=24"),
    *("data.max_validation_rows=8", "trainer.batch_size=8", "trainer.num_steps=4", "trainer.ckpt_interval=2"),
    *("trainer.eval_samples=0", "tracker=[]"),
)
BY_LENGTH = ("environment=single_turn", "environment.reward=recorded_parts:length")
STEPWISE = ("generator.step_wise_trajectories=true",)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command whose folder is compared; `{NAME}` in it is what the run `NAME` left, `{shared}` what both sides read."""

    command: Sequence[str]
    made_once: Sequence[str] = ()
    """A command that this checkout runs into `{shared}/NAME` before: its journal is what both sides replay, since which
    trajectories are ready first differs from run to run."""


RUNS: Mapping[str, Run] = {
    "grpo": Run(command=(*RL, "data.validation=[builtin:word_problems/validation]", "data.max_validation_prompts=4")),
    "ppo": Run(command=(*RL, "algorithm=ppo")),
    "stepwise": Run(command=(*RL, *STEPWISE)),
    "tree": Run(command=(*RL, *STEPWISE, "trainer.layout=prefix_shared")),
    "dapo": Run(command=(*RL, "algorithm=dapo", *BY_LENGTH)),
    "distillation": Run(command=(*RL, "algorithm=distillation", "reference.model.path={grpo}/export")),
    "async": Run(
        made_once=(*RL, "trainer.max_staleness=1", "trainer.total_steps=4", "trainer.dump_rollouts=false"),
        command=(*RL, "trainer.total_steps=4", "generator=replay", "generator.replay_path={shared}/async/journal"),
    ),
    "agent": Run(
        command=(
            *(*RL, *STEPWISE, "generator=agent", "generator.agent_loop.run=recorded_parts:play"),
            "generator.max_turns=2",
        )
    ),
    "tools": Run(
        command=(
            *(*RL, "environment.tools=[recorded_parts:add]", "model.path={shared}/with_tools"),
            *("data.max_prompt_length=400", "generator.max_context_length=800"),
        )
    ),
    "vision": Run(
        command=(
            *(*RL, *BY_LENGTH, "model.path={shared}/vision", "data.train=[{shared}/pictures/asked.jsonl]"),
            *("generator.sampling.max_generate_length=4", "data.max_prompt_length=64"),
            "generator.max_context_length=128",
        )
    ),
    "lora": Run(command=(*RL, "model.lora.rank=4", "trainer.policy.optimizer.lr=1e-3")),
    "fork": Run(
        command=(
            *(*RL, "trainer.resume_mode=fork", "trainer.resume_path={grpo}"),
            *("trainer.policy.optimizer.lr=1e-3", "trainer.total_steps=3"),
        )
    ),
    "sft": Run(command=(*SFT, "trainer.layout=packed")),
    "ranks": Run(command=(*RL, "strategy=fsdp2", "placement=cpu_2")),
}


def make_shared(folder: Path) -> None:
    """Write what both sides read."""
    folder.mkdir(parents=True)
    model_with_tools(folder / "with_tools")
    write_rows(folder / "pictures")
    save_model(folder / "vision")
