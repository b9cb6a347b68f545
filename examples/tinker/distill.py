"""On-policy distillation with Tinker's cookbook on prompts of a file, one a line:
`python examples/tinker/distill.py prompts=FILE teacher=tinker://... model_name=ORG/NAME log_path=FOLDER`.

It runs in the environment of `scripts/client_env.sh cookbook`, with TINKER_BASE_URL and TINKER_API_KEY. The teacher is a
saved sampler of the same base model.
"""

import asyncio
from pathlib import Path

import chz
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, PromptOnlyDataset, TeacherConfig
from tinker_cookbook.distillation.train_on_policy import Config, main
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer


@chz.chz
class PromptsOfFile(RLDatasetBuilder):
    path: str
    model_name: str
    batch_size: int
    group_size: int

    async def __call__(self) -> tuple[PromptOnlyDataset, None]:
        tokenizer = get_tokenizer(self.model_name)
        renderer = get_renderer(get_recommended_renderer_name(self.model_name), tokenizer=tokenizer)
        prompts = Path(self.path).read_text(encoding="utf-8").splitlines()
        return PromptOnlyDataset(prompts, self.batch_size, self.group_size, renderer, tokenizer), None


def build_config(
    prompts: str,
    teacher: str,
    model_name: str,
    log_path: str,
    batch_size: int = 4,
    group_size: int = 4,
    max_tokens: int = 64,
    learning_rate: float = 1e-4,
) -> Config:
    builder = PromptsOfFile(path=prompts, model_name=model_name, batch_size=batch_size, group_size=group_size)
    of_teacher = TeacherConfig(base_model=model_name, load_checkpoint_path=teacher)
    dataset = DistillationDatasetConfig(dataset_builder=builder, teacher_config=of_teacher, groups_per_batch=batch_size)
    return Config(
        log_path=log_path,
        model_name=model_name,
        renderer_name=get_recommended_renderer_name(model_name),
        recipe_name="distill",
        dataset_configs=[dataset],
        max_tokens=max_tokens,
        learning_rate=learning_rate,
        eval_every=0,
    )


if __name__ == "__main__":
    asyncio.run(main(chz.entrypoint(build_config)))
