"""The learner of one model of a run: loaded or awaited, adapted, compiled, and spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cpp_builder
from torch.utils import _triton

from skyrl_train.batch.layouts import CostModel
from skyrl_train.batch.planner import make_micro_batch_strategy
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import ModelConfig, PlatformConfig, mesh_sizes
from skyrl_train.distributed import ModelStrategy, RankContext, RankMesh, SequenceGroup, SingleProcess, make_strategy
from skyrl_train.errors import ModelError
from skyrl_train.learner.critic import CriticLearner
from skyrl_train.learner.engine import ModelEngine
from skyrl_train.learner.policy import PolicyLearner
from skyrl_train.learner.profiling import Profiler
from skyrl_train.model import (
    HEAD,
    decoder_layers,
    empty_causal_lm,
    empty_value_model,
    load_causal_lm,
    load_tokenizer,
    load_value_model,
    supported_layout,
)
from skyrl_train.model.layers import leave_uncompiled, weight_dtype
from skyrl_train.model.lora import add_adapter
from skyrl_train.model.parallel import check_divisible, check_experts, follow_routing
from skyrl_train.model.sizes import meta_model, read_architecture
from skyrl_train.model.vision import freeze_vision
from skyrl_train.system import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_learner(settings: LearnerSettings, *, strategy: ModelStrategy | None = None) -> PolicyLearner | CriticLearner:
    """Load the model and make the learner for this process, or this process's part of it where a `strategy` is given.

    Raises ModelError, ConfigError.
    """
    if settings.role == "critic":
        engine = build_engine(settings, load=load_value_model, empty=empty_value_model, strategy=strategy)
    else:
        _require_same_tokenizer(settings.model, settings.policy_model)
        engine = build_engine(settings, load=load_causal_lm, empty=empty_causal_lm, strategy=strategy)
    return learner_of(engine, settings)


def build_strategy(settings: LearnerSettings, device: torch.device, *, num_ranks: int = 1) -> ModelStrategy:
    """Return what spreads the model over its ranks, on each of them after they have joined the default process group.

    Raises ConfigError where a custom part makes something else.
    """
    chosen = settings.strategy
    size = chosen.sequence_parallel_size
    sizes, deadline = mesh_sizes(chosen, num_ranks), settings.collective_timeout_s
    ranks = RankContext(
        num_ranks=num_ranks,
        device=device,
        dtype=_compute_dtype(settings.model),
        cpu_offload=chosen.offloads_all,
        gradient_sync=chosen.gradient_sync,
        layers_ahead=chosen.layers_ahead,
        group=SequenceGroup(size, timeout_s=deadline) if size > 1 else None,
        mesh=RankMesh(sizes=sizes, device_type=device.type, timeout_s=deadline),
    )
    return make_strategy(chosen, ranks)


def learner_of(engine: ModelEngine, settings: LearnerSettings) -> PolicyLearner | CriticLearner:
    """Return what computes the role's scores and losses with the model of `engine`."""
    if settings.role == "critic":
        return CriticLearner(engine, model=settings.policy_model, algorithm=settings.algorithm)
    return PolicyLearner(
        engine,
        model=settings.model,
        algorithm=settings.algorithm,
        temperature=settings.temperature,
        on_policy=settings.on_policy,
    )


def _cost_of(model: PreTrainedModel, platform: PlatformConfig) -> CostModel:
    """What rows cost on ranks of this model, the same on all of them."""
    device = torch.device(platform.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return CostModel.of_config(model.config.get_text_config().to_dict(), device=name, recorded=platform.rates)


def build_engine(
    settings: LearnerSettings,
    *,
    load: Callable[..., PreTrainedModel],
    empty: Callable[..., PreTrainedModel],
    strategy: ModelStrategy | None = None,
) -> ModelEngine:
    """Return the engine for this process, or this process's part of it where a `strategy` is given.

    `load(model, device, dtype=)` reads weights to a device; `empty(model, dtype=)` makes the model without memory, for ranks
    that receive their shards from rank 0. Raises ModelError, ConfigError.
    """
    spread, model = strategy or SingleProcess(), settings.model
    if spread.expert_ranks > 1 or spread.tensor_ranks > 1:
        _require_divisible(model, spread)
    batching = settings.micro_batching
    dtype = weight_dtype(model, frozen=settings.frozen)
    # Rank 0 alone reads the files and hands out shards: the others would fill the host with copies of the whole model.
    if spread.rank and spread.receives:
        loaded, layout = empty(model, dtype=dtype), batching.layout
    else:
        # In the host where it will be spread: the whole model may be more than a device holds.
        loaded = load(model, "cpu" if spread.receives else settings.platform.device, dtype=dtype)
        layout = supported_layout(
            loaded,
            batching.layout,
            name=model.path,
            sequence_parallel_size=settings.strategy.sequence_parallel_size,
        )
    if model.lora.rank:
        adapt(loaded, settings)
    if "vision" in model.freeze:
        freeze_vision(loaded, name=model.path)
    if model.compile:
        compile_layers(loaded, name=model.path)
    if settings.replays_routing:
        follow_routing(loaded, name=model.path, try_it=not (spread.rank and spread.receives))
    # Rank 0's word for all: the other ranks have no weights to try a layout with, and all must plan alike.
    batching = replace(batching, layout=spread.of_rank_0(layout))
    engine = ModelEngine(
        loaded,
        strategy=spread,
        name=settings.role,
        micro_batching=make_micro_batch_strategy(
            batching,
            merge_turns=settings.merge_turns,
            cost=_cost_of(loaded, settings.platform),
        ),
        dtype=_compute_dtype(model),
        optimizer=settings.optimizer,
        state_in_host=settings.strategy.offloads_state,
        total_optimizer_steps=settings.schedule.optimizer_steps,
        total_documents=settings.schedule.documents,
    )
    if settings.profile_steps and settings.optimizer is not None:
        folder, device = Path(settings.profiles), engine.passes.device
        engine.profiler = Profiler(settings.profile_steps, folder, name=settings.role, rank=spread.rank, device=device)
    return engine


def _require_divisible(model: ModelConfig, spread: ModelStrategy) -> None:
    """Raises ModelError, before weights are read, for a model whose experts or matrices cannot be divided over the ranks."""
    formed = meta_model(read_architecture(model.path, revision=model.revision), name=model.path)
    if spread.expert_ranks > 1:
        check_experts(formed, size=spread.expert_ranks, num_shards=spread.num_shards, name=model.path)
    if spread.tensor_ranks > 1:
        check_divisible(formed, spread.tensor_ranks, name=model.path)


def _compute_dtype(model: ModelConfig) -> torch.dtype:
    return torch.bfloat16 if model.dtype == "bfloat16" else torch.float32


def adapt(loaded: PreTrainedModel, settings: LearnerSettings) -> None:
    """Add the role's adapter; that of a critic leaves the value head to be trained whole."""
    if settings.role == "critic":
        seed, head = derive_seed(settings.seed, "critic"), HEAD
    else:
        seed, head = settings.seed, ""
    frozen = "vision" in settings.model.freeze
    add_adapter(loaded, lora=settings.model.lora, seed=seed, head=head, without_tower=frozen)


def _require_same_tokenizer(model: ModelConfig, policy: ModelConfig) -> None:
    """Raises ModelError where a reference of its own gives the policy's token ids another meaning."""
    # The same files in nearly all runs: no vocabulary is read for them.
    if (model.path, model.tokenizer_path, model.revision) == (policy.path, policy.tokenizer_path, policy.revision):
        return
    own, expected = load_tokenizer(model).get_vocab(), load_tokenizer(policy).get_vocab()
    if own != expected:
        differing = sorted(set(own.items()) ^ set(expected.items()))
        raise ModelError(
            f"reference.model.path {model.path!r}: its tokenizer is not that of {policy.path!r} ({len(own)} and "
            f"{len(expected)} entries, {differing[0][0]!r} differs), so it cannot score the policy's tokens. "
            "Give a model of the same family"
        )


def compile_layers(model: PreTrainedModel, *, name: str) -> None:
    """Compiles each decoder layer in place, at its first use; names of parameters stay.

    Sizes are left open: rows, positions and segments differ from one micro-batch to the next. Attention over segments
    has kernels of its own and stays out of the graphs, on both sides of which torch compiles.
    Raises ModelError where there is no compiler, or nothing to compile.
    """
    # Asked now: torch would look for its compiler in the first forward, which may come after a whole rollout.
    reason = _why_not_compiled(model.device)
    if reason:
        raise ModelError(f"model path {name!r}: model.compile=true, but {reason}. Or set model.compile=false")
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(
            f"model path {name!r}: {type(model).__name__} declares no decoder layers to compile. "
            "Set model.compile=false"
        )
    leave_uncompiled()
    for layer in layers:
        layer.compile(dynamic=True)


def _why_not_compiled(device: torch.device) -> str:
    """Why nothing can be compiled here, with what would help; empty where it can."""
    if device.type == "cuda":
        return "" if _triton.has_triton() else "torch finds no working Triton. Install the triton that fits this torch"

    find: Any = cpp_builder.get_cpp_compiler
    try:
        find()
    except Exception as error:
        return f"torch finds no C++ compiler ({type(error).__name__}). Install one (g++), or name it in CXX"
    folder = str(Path(torch.__file__).parent)
    if " " in folder:  # torch does not quote it in the commands that it gives the compiler
        return (
            f"torch is installed in {folder!r}, whose blank its compiler commands do not survive. Install it elsewhere"
        )
    return ""
