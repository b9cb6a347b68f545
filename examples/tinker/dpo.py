"""DPO with Tinker's cookbook on comparisons of a file:
`python examples/tinker/dpo.py comparisons=FILE model_name=ORG/NAME log_path=FOLDER`.

It runs in the environment of `scripts/client_env.sh cookbook`, with TINKER_BASE_URL and TINKER_API_KEY. A line of the file
is `{"comparison": {"prompt_conversation": [...], "completion_A": [...], "completion_B": [...]}, "label": "A"}`, with lists
of messages.
"""

import chz
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.preference.train_dpo import Config, main
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def build_config(
    comparisons: str, model_name: str, log_path: str, batch_size: int = 4, learning_rate: float = 1e-4
) -> Config:
    renderer = get_recommended_renderer_name(model_name)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model_name, renderer_name=renderer, max_length=1024, batch_size=batch_size
    )
    return Config(
        log_path=log_path,
        model_name=model_name,
        renderer_name=renderer,
        recipe_name="dpo",
        learning_rate=learning_rate,
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=common, comparison_builder=ComparisonBuilderFromJsonl(train_path=comparisons)
        ),
    )


if __name__ == "__main__":
    main(chz.entrypoint(build_config))
