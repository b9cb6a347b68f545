"""Tiny models and batches for tests of the learners."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.batch import BatchMetadata, TrainingInputBatch, offsets_of
from skyrl_train.batch.planner import MemoryAwareBatchIterator, make_micro_batch_strategy
from skyrl_train.batch.steps import MiniBatch, close_mini_batch
from skyrl_train.config import Config, TrainerConfig
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.derived import LearnerSettings, learner_settings
from skyrl_train.config.fields import LayoutChoice
from skyrl_train.config.models import ModelConfig, OptimizerConfig
from skyrl_train.config.placement import Role
from skyrl_train.distributed import ModelStrategy
from skyrl_train.learner import CriticLearner, ModelEngine, PolicyLearner, build_learner, compile_layers
from skyrl_train.model import load_causal_lm, quiet_transformers
from skyrl_train.plan import plan_batches

VOCABULARY = 50


def save_tiny_model(
    folder: Path, *, tied: bool = True, tokenizer: bool = False, seed: int = 0, num_hidden_layers: int = 2
) -> Path:
    """A random Qwen2 of hidden size 32, in Hugging Face format."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    tell_tensors_apart(model)
    with quiet_transformers():
        model.save_pretrained(folder)
    if tokenizer:
        save_tiny_tokenizer(folder)
    return folder


def tell_tensors_apart(model: nn.Module) -> None:
    """Moves norm weights and biases, which start as ones and zeros, so that no tensor can stand for another."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def save_tiny_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w3", eos_token="w2", pad_token="w0").save_pretrained(
        folder
    )


def fixed_rows(rows: int, layout: LayoutChoice = "padded", *, merge_turns: bool = False) -> MemoryAwareBatchIterator:
    """Micro-batches of at most so many rows, for training as for scoring."""
    return make_micro_batch_strategy(
        TrainerConfig(micro_train_batch_size_per_gpu=rows, micro_forward_batch_size_per_gpu=rows, layout=layout),
        merge_turns=merge_turns,
    )


def make_double(model: nn.Module) -> None:
    """Computes in float64 throughout: transformers' norms would round to float32 inside, forward and backward."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm", "LlamaRMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    model.double()


def make_learner(
    folder: Path,
    *,
    role: str = "policy",
    optimizer: OptimizerConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
    rows_per_micro_batch: int = 4,
    double: bool = False,
    temperature: float = 1.0,
    total_optimizer_steps: int = 10,
    total_documents: int = 0,
    compiled: bool = False,
    layout: LayoutChoice = "padded",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    state_in_host: bool = False,
) -> PolicyLearner:
    """A learner on the model in `folder`; `double` computes in float64, `dtype` is that of the forward pass else."""
    model_config = ModelConfig(path=str(folder), gradient_checkpointing=gradient_checkpointing)
    model = load_causal_lm(model_config, device)
    if double:
        make_double(model)
    if compiled:
        compile_layers(model, name=str(folder))
    engine = ModelEngine(
        model,
        name=role,
        micro_batching=fixed_rows(rows_per_micro_batch, layout),
        dtype=dtype,
        optimizer=(optimizer or OptimizerConfig(lr=1e-2)) if role == "policy" else None,
        state_in_host=state_in_host,
        total_optimizer_steps=total_optimizer_steps,
        total_documents=total_documents,
    )
    return PolicyLearner(engine, model=model_config, algorithm=algorithm or AlgorithmConfig(), temperature=temperature)


def supervised_learner(
    model: PreTrainedModel, config: ModelConfig, *, layout: LayoutChoice, tokens: int
) -> PolicyLearner:
    """Cross-entropy, micro-batches of at most `tokens` computed positions."""
    trainer = TrainerConfig(
        micro_batching="token_budget",
        max_tokens_per_microbatch=tokens,
        max_tokens_per_forward_microbatch=tokens,
        layout=layout,
    )
    engine = ModelEngine(
        model,
        name="policy",
        micro_batching=make_micro_batch_strategy(trainer),
        optimizer=OptimizerConfig(lr=1e-2),
        total_optimizer_steps=10,
    )
    return PolicyLearner(engine, model=config, algorithm=AlgorithmConfig(policy_loss="cross_entropy"), temperature=1.0)


def make_batch(
    lengths: list[int], *, prompt_length: int = 3, samples: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64
) -> TrainingInputBatch:
    """One row per trajectory, `samples` to a prompt, every token after the first `prompt_length` trained.

    Log-probabilities and advantages are random numbers of the size they have in training.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = len(lengths), sum(lengths)
    position = torch.cat([torch.arange(length) for length in lengths])

    def numbers(scale: float, offset: float = 0.0) -> Tensor:
        drawn = torch.randn(tokens, generator=generator, dtype=torch.float64)
        return (offset + scale * drawn).to(dtype)

    return TrainingInputBatch(
        token_columns={
            "input_ids": torch.randint(3, VOCABULARY, (tokens,), generator=generator).int(),
            "loss_mask": position >= prompt_length,
            "rewards": torch.zeros(tokens),
            "old_logprobs": numbers(0.3, -4.0),
            "rollout_logprobs": numbers(0.3, -4.0),
            "ref_logprobs": numbers(0.3, -4.0),
            "advantages": numbers(1.0),
        },
        row_columns={
            "prompt_index": torch.arange(rows).div(samples, rounding_mode="floor").int(),
            "trajectory_index": torch.arange(rows).int(),
            "step_index": torch.zeros(rows, dtype=torch.int32),
            "is_last_step": torch.ones(rows, dtype=torch.bool),
            "is_padding": torch.zeros(rows, dtype=torch.bool),
        },
        row_offsets=offsets_of(torch.tensor(lengths)),
        metadata=BatchMetadata(
            uids=tuple(f"p{row // samples}" for row in range(rows)), global_step=1, weight_version=1
        ),
    )


def settings_of(config: Config, role: Role, *, num_train_prompts: int = 64) -> LearnerSettings:
    """What a run of `config` builds the role's model from."""
    plan = plan_batches(config, num_train_prompts=num_train_prompts)
    return learner_settings(config, role, plan.schedule(role))


def policy_of(config: Config, *, role: Role = "policy", strategy: ModelStrategy | None = None) -> PolicyLearner:
    """The policy of a run, or its reference, in this process."""
    learner = build_learner(settings_of(config, role), strategy=strategy)
    assert isinstance(learner, PolicyLearner)
    return learner


def critic_of(config: Config, *, strategy: ModelStrategy | None = None) -> CriticLearner:
    """The critic of a run, in this process."""
    learner = build_learner(settings_of(config, "critic"), strategy=strategy)
    assert isinstance(learner, CriticLearner)
    return learner


LENGTHS = [5, 9, 7, 12]


def close(batch: TrainingInputBatch) -> MiniBatch:
    return close_mini_batch(batch, loss_reduction="token_mean", max_sequence_length_for_norm=64)


def snapshot(learner: PolicyLearner) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in learner.weights()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
