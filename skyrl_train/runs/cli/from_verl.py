"""What several settings of verl, and of SkyRL, say together."""

from __future__ import annotations

import math

from skyrl_train.runs.cli.foreign_names import (
    Converter,
    context,
    estimator,
    gpus_and_nodes,
    kl,
    loss,
    losses,
    reduction,
    schedule,
    trackers,
)


def convert_verl(to: Converter) -> None:
    """A configuration of verl's PPO trainer, which has all of its algorithms."""
    take, section = to.take, "actor_rollout_ref.actor"
    kind = take("algorithm.adv_estimator")
    if kind != "gae":
        to.done |= {name for name in to.values if name.startswith("critic.")}
    known = {"reinforce_plus_plus": "reinforce++", "reinforce_plus_plus_baseline": "reinforce++_baseline"}
    known |= {"grpo_passk": "grpo_pass_at_k"} | {name: name for name in ("grpo", "rloo", "remax", "opo", "gpg", "gdpo")}
    estimator(to, kind, known, "algorithm.adv_estimator", take("algorithm.lam"))
    chosen = take(f"{section}.policy_loss.loss_mode")
    c = take(f"{section}.clip_ratio_c", 3.0)
    if chosen == "vanilla":  # which always has the second bound
        loss(to, "dual_clip", f"{section}.policy_loss.loss_mode", clip_ratio_c=c)
    else:
        losses(to, chosen, f"{section}.policy_loss.loss_mode", section)
    clip = take(f"{section}.clip_ratio")
    low, high = (take(f"{section}.clip_ratio_{end}", clip) for end in ("low", "high"))
    to.set("trainer.algorithm.eps_clip_low", low, f"{section}.clip_ratio_low")
    to.set("trainer.algorithm.eps_clip_high", high, f"{section}.clip_ratio_high")
    kl(
        to,
        f"{section}.use_kl_loss",
        f"{section}.kl_loss_coef",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
    )
    reduction(to, f"{section}.loss_agg_mode", take(f"{section}.loss_agg_mode", "token-mean"))
    prompt, response = take("data.max_prompt_length"), take("data.max_response_length")
    to.done |= {"actor_rollout_ref.rollout.prompt_length", "actor_rollout_ref.rollout.response_length"}
    to.set("data.max_prompt_length", prompt, "data.max_prompt_length")
    to.set("generator.sampling.max_generate_length", response, "data.max_response_length")
    context(to, prompt, response, "data.max_response_length")
    if not take("actor_rollout_ref.rollout.multi_turn.enable", False):
        to.set("generator.max_turns", 1, "actor_rollout_ref.rollout.multi_turn.enable")
        to.done |= {name for name in to.values if ".multi_turn." in name}
    _reward_of_verl(to)
    for name in (f"{section}.optim.lr_scheduler_type", f"{section}.optim.warmup_style"):
        schedule(to, name)
    share, steps = take(f"{section}.optim.lr_warmup_steps_ratio", 0), to.values.get("trainer.total_training_steps")
    if share:
        said = f"{share}: trainer.policy.optimizer.warmup_steps counts optimizer steps, of {steps or 'all'} batches"
        to.person(f"{section}.optim.lr_warmup_steps_ratio", said)
    if "trainer.logger" in to.values:
        trackers(to, "trainer.logger", take("trainer.logger"))
    if (engine := take("actor_rollout_ref.rollout.name")) not in (None, "vllm"):
        to.person("actor_rollout_ref.rollout.name", f"{engine}: generator=vllm, or generator=http for a server")
    if (strategy := take(f"{section}.strategy")) not in (None, "fsdp", "fsdp2"):
        to.person(f"{section}.strategy", f"{strategy}: models are sharded by strategy=fsdp2")
    to.done |= {f"{each}.strategy" for each in ("critic", "actor_rollout_ref.ref")}
    gpus_and_nodes(to, take("trainer.n_gpus_per_node", 8), take("trainer.nnodes", 1))


def _reward_of_verl(to: Converter) -> None:
    path, name = to.take("custom_reward_function.path"), to.take("custom_reward_function.name", "compute_score")
    if path:
        to.set("environment.reward", f"{path}:{name}", "custom_reward_function.path")
    elif "custom_reward_function.path" not in to.found.unknown:
        said = "verl scores by each row's data_source: environment.reward=exact_match, math_verify or my_code:compute_score"
        to.person("custom_reward_function.path", said)


def convert_skyrl(to: Converter) -> None:
    """A configuration of SkyRL, most of whose names are the same here."""
    take, section = to.take, "trainer.algorithm"
    kind = take(f"{section}.advantage_estimator", "grpo")
    known = {name: name for name in ("grpo", "rloo", "reinforce++", "maxrl")}
    estimator(to, kind, known, f"{section}.advantage_estimator", take(f"{section}.lambd"))
    if kind != "gae":
        to.done |= {name for name in to.values if name.startswith(("trainer.critic", "trainer.placement.critic"))}
    chosen = take(f"{section}.policy_loss_type", "regular")
    losses(to, chosen, f"{section}.policy_loss_type", section)
    kl(to, f"{section}.use_kl_loss", f"{section}.kl_loss_coef", f"{section}.use_kl_in_reward", "")
    bonus, weight = take(f"{section}.use_entropy_loss"), take(f"{section}.entropy_loss_coef", 0.01)
    if bonus:
        to.set(f"{section}.entropy_coef", weight, f"{section}.entropy_loss_coef")
    reduction(to, f"{section}.loss_reduction", take(f"{section}.loss_reduction", "token_mean"))
    response = to.values.get("generator.sampling_params.max_generate_length")
    prompt = to.values.get("trainer.max_prompt_length")
    context(to, take("generator.max_input_length", prompt), response, "generator.max_input_length")
    schedule(to, "trainer.policy.optimizer_config.scheduler")
    if "trainer.logger" in to.values:
        trackers(to, "trainer.logger", take("trainer.logger"))
    if (interval := take("trainer.hf_save_interval", -1)) > 0:
        to.set("trainer.export_hf", True, "trainer.hf_save_interval")
        to.person("trainer.hf_save_interval", f"{interval}: the final policy is exported, and no other")
    if take("trainer.max_ckpts_to_keep", 1) == -1:
        to.person("trainer.max_ckpts_to_keep", "-1: trainer.max_ckpts_to_keep=1000 keeps as good as all")
    elif "trainer.max_ckpts_to_keep" in to.values:
        kept = to.values["trainer.max_ckpts_to_keep"]
        to.set("trainer.max_ckpts_to_keep", kept, "trainer.max_ckpts_to_keep")
    if take("trainer.flash_attn") is not None:
        to.found.not_needed["trainer.flash_attn"] = "model.attention=auto chooses; flash_attention_2 needs flash-attn"
    if (strategy := take("trainer.strategy", "fsdp2")) not in ("fsdp", "fsdp2"):
        to.person("trainer.strategy", f"{strategy}: models are sharded by strategy=fsdp2")
    if (engine := take("generator.backend", "vllm")) != "vllm":
        to.person("generator.backend", f"{engine}: generator=vllm, or generator=http for a server")
    placed = {name for name in to.values if name.startswith("trainer.placement.")}
    to.done |= placed
    gpus, nodes = (to.values.get(f"trainer.placement.policy_num_{each}") for each in ("gpus_per_node", "nodes"))
    to.found.not_needed |= dict.fromkeys(placed, "placement=auto chooses for the GPUs that there are")
    if to.values.get("trainer.fully_async.max_staleness_steps") and isinstance(gpus, int):
        gpus += _gpus_of_engines(to)  # which are others than the policy's
    gpus_and_nodes(to, gpus, nodes or 1)


def _gpus_of_engines(to: Converter) -> int:
    """Of SkyRL's engines, whose settings lie in `generator`, or in its `inference_engine`."""
    counts = (
        ("num_inference_engines", "inference_engine_tensor_parallel_size"),
        ("inference_engine.num_engines", "inference_engine.tensor_parallel_size"),
    )
    stated = [[to.values.get(f"generator.{name}") for name in names] for names in counts]
    return max(math.prod(each for each in both if isinstance(each, int)) for both in stated)
