"""What several settings of TRL say together: batches that are counted in samples, steps of the optimizer, losses, data."""

from __future__ import annotations

from skyrl_train.registry import TARGET
from skyrl_train.runs.cli.foreign_names import Converter, context, gpus_and_nodes, loss, schedule, trackers

_SIZES = {"num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"}
"""Names that its batch follows from."""


def convert(to: Converter) -> None:
    """A configuration of GRPO or RLOO."""
    take = to.take
    groups, devices = take("num_generations"), to.gpus or 1
    rows, accumulated = take("per_device_train_batch_size", 8), take("gradient_accumulation_steps", 1)
    steps = take("steps_per_generation", accumulated)
    generated = take("generation_batch_size", rows * devices * steps)
    passes = take("num_iterations", 1)
    update = rows * devices * accumulated
    to.set("generator.n_samples_per_prompt", groups, "num_generations")
    if computed := _SIZES & {*to.found.unknown}:
        to.person("sizes", f"{', '.join(sorted(computed))} is computed: trainer.train_batch_size counts prompts")
    elif generated % groups or update % groups or generated % update:
        said = f"{generated} samples are generated and {update} make an update, of {groups} of each prompt: "
        to.person("per_device_train_batch_size", f"{said}sizes here are whole prompts; choose trainer.train_batch_size")
    else:
        to.set("trainer.train_batch_size", generated // groups, "generation_batch_size")
        to.set("trainer.policy_mini_batch_size", update // groups, "per_device_train_batch_size")
        to.set("trainer.micro_train_batch_size_per_gpu", rows, "per_device_train_batch_size")
    to.set("trainer.update_epochs_per_batch", passes, "num_iterations")
    _steps(to, max(1, generated // update) * passes)
    _loss_of(to)
    response, prompt = take("max_completion_length"), to.values.get("max_prompt_length")
    to.set("generator.sampling.max_generate_length", response, "max_completion_length")
    context(to, prompt, response, "max_prompt_length of TRL")
    to.set("generator.max_turns", 1, "one turn")
    if "tools" in to.values or "max_tool_calling_iterations" in to.values:
        to.found.settings.pop("generator.max_turns")
    betas = [take("adam_beta1", 0.9), take("adam_beta2", 0.999)]
    to.set("trainer.policy.optimizer.betas", betas, "adam_beta1")
    _optimizer(to)
    _data(to)
    if "report_to" in to.values:
        trackers(to, "report_to", take("report_to"))
    if (vllm := take("use_vllm")) is not None:
        to.found.settings["generator"] = "vllm" if vllm else "hf"
    if "vllm_mode" in to.values:
        take("vllm_mode")
        to.found.not_needed["vllm_mode"] = "placement=auto chooses whether models and engines share devices"
    if "lora_r" in to.values:
        take("use_peft")
    gpus_and_nodes(to, 0, 1)


def convert_supervised(to: Converter) -> None:
    """A configuration of supervised training."""
    take = to.take
    sizes = [take("per_device_train_batch_size", 8), take("gradient_accumulation_steps", 1), to.gpus or 1]
    if not _SIZES & {*to.found.unknown}:
        to.set("trainer.batch_size", sizes[0] * sizes[1] * sizes[2], "per_device_train_batch_size")
        to.set("trainer.micro_train_batch_size_per_gpu", sizes[0], "per_device_train_batch_size")
    _optimizer(to)
    for theirs, ours in (("train_data", "data.train"), ("val_data", "data.validation")):
        if (files := take(theirs)) is not None:
            to.set(ours, files, theirs)
    if (name := take("dataset_name")) is not None:
        config, test = take("dataset_config"), take("dataset_test_split")
        whole = f"{name}/{config}" if config else name
        to.set("data.train", [f"{whole}:{take('dataset_train_split', 'train')}"], "dataset_name")
        to.set("data.validation", [f"{whole}:{test}"] if test else [], "dataset_test_split")
    if "report_to" in to.values:
        trackers(to, "report_to", take("report_to"))
    if "lora_r" in to.values:
        take("use_peft")
    gpus_and_nodes(to, 0, 1)


def _steps(to: Converter, updates: int) -> None:
    """Convert what TRL counts in optimizer steps, of which a training batch has `updates`."""
    for name, setting in (
        ("max_steps", "trainer.total_steps"),
        ("save_steps", "trainer.ckpt_interval"),
        ("eval_steps", "trainer.eval_interval"),
    ):
        value = to.take(name)
        if value is None:
            continue
        if value == -1:
            to.set(setting, 0, name)
        elif not isinstance(value, int) or value % updates:
            to.person(name, f"{value} optimizer steps: {setting} counts training batches, of {updates} each")
        else:
            to.set(setting, value // updates, name)
    for name, setting in (("save_strategy", "trainer.ckpt_interval"), ("eval_strategy", "trainer.eval_interval")):
        value = to.take(name)
        if value in ("no", False):
            to.set(setting, 0, name)
        elif value == "epoch":
            to.person(name, f"epoch: {setting} counts training batches")
    epochs = to.take("num_train_epochs")
    if epochs is not None and to.values.get("max_steps", -1) == -1:
        to.set("trainer.epochs", int(epochs) if epochs == int(epochs) else epochs, "num_train_epochs")


def _loss_of(to: Converter) -> None:
    kind, level = to.take("loss_type"), to.take("importance_sampling_level", "token")
    low = to.take("epsilon")
    to.set("trainer.algorithm.eps_clip_low", low, "epsilon")
    to.set("trainer.algorithm.eps_clip_high", to.take("epsilon_high", low), "epsilon_high")
    reductions = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "seq_mean_token_sum_norm"}
    reductions |= {"cispo": "token_mean", "sapo": "token_mean"}
    if kind in reductions:
        to.set("trainer.algorithm.loss_reduction", reductions[kind], "loss_type")
    else:
        to.person("loss_type", f"{kind}: trainer.algorithm.policy_loss and trainer.algorithm.loss_reduction")
    if kind == "dr_grpo" and (longest := to.values.get("max_completion_length")) is not None:
        to.set("trainer.algorithm.max_sequence_length_for_norm", longest, "loss_type")
    arguments = {name: to.take(name) for name in ("delta", "sapo_temperature_pos", "sapo_temperature_neg")}
    if level in ("sequence", "sequence_token"):
        loss(to, "gspo", "importance_sampling_level")
    elif kind == "cispo":
        loss(to, "cispo", "loss_type")
    elif kind == "sapo":
        loss(
            to,
            "sapo",
            "loss_type",
            tau_pos=arguments["sapo_temperature_pos"],
            tau_neg=arguments["sapo_temperature_neg"],
        )
    elif arguments["delta"] is not None:
        loss(to, "dual_clip", "delta", clip_ratio_c=arguments["delta"])
    scale = to.take("scale_rewards", "group")
    if scale in (True, "group", False, "none"):
        to.set("trainer.algorithm.normalize_by_std", scale in (True, "group"), "scale_rewards")
    else:
        to.person("scale_rewards", f"{scale}: trainer.algorithm.normalize_by_std is by the group's deviation")
    if "vllm_importance_sampling_mode" in to.values:
        weight, _, mode = str(to.take("vllm_importance_sampling_mode")).partition("_")
        to.set("trainer.algorithm.off_policy.weight", weight, "vllm_importance_sampling_mode")
        to.set("trainer.algorithm.off_policy.weight_mode", mode, "vllm_importance_sampling_mode")


def _optimizer(to: Converter) -> None:
    """Names of schedules and of AdamW's kinds, which here are fewer."""
    names = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw": "adamw", "sgd": "sgd"}
    if (given := to.take("optim")) is not None:
        if given in names:
            to.set(f"{to.optimizer}.name", names[given], "optim")
        else:
            to.person("optim", f"{given}: trainer.policy.optimizer.name is adamw, sgd or my_code:NAME")
    schedule(to, "lr_scheduler_type")
    share, steps = to.take("warmup_ratio"), to.values.get("max_steps", -1)
    if share and steps > 0:
        to.set(f"{to.optimizer}.warmup_steps", round(share * steps), "warmup_ratio")
    elif share:
        to.person("warmup_ratio", f"{share}: trainer.policy.optimizer.warmup_steps counts optimizer steps")


def _data(to: Converter) -> None:
    name, config = to.take("dataset_name"), to.take("dataset_config")
    splits = to.take("dataset_train_split", "train"), to.take("dataset_test_split")
    if name is not None:
        whole = f"{name}/{config}" if config else name
        to.set("data.train", [f"{whole}:{splits[0]}"], "dataset_name")
        to.set("data.validation", [f"{whole}:{splits[1]}"] if splits[1] else [], "dataset_test_split")
    for theirs, ours in (("train_data", "data.train"), ("val_data", "data.validation")):
        if (files := to.take(theirs)) is not None:
            to.set(ours, files, theirs)
    if name is None and "val_data" not in to.values and "val_data" not in to.found.unknown:
        to.set("data.validation", [], "no held-out data")
    functions, weights = to.take("reward_funcs"), to.take("reward_weights")
    functions = [functions] if isinstance(functions, str) else functions
    if functions is None:
        to.person("reward_funcs", "not in this file: environment.reward=my_code:NAME")
        return
    parts = [_reward(to, each) for each in functions]
    if None in parts:
        return
    if weights is not None and len(weights) == len(parts):
        whole = [{TARGET: part, "weight": weight} for part, weight in zip(parts, weights)]
        to.set("environment.rewards", whole, "reward_weights")
    elif len(parts) == 1:
        to.set("environment.reward", parts[0], "reward_funcs")
    else:
        to.set("environment.rewards", parts, "reward_funcs")


def _reward(to: Converter, function: str) -> str | None:
    """Return how a reward of TRL's is named here; None, with what is to be done, where it has no module."""
    if function in ("accuracy_reward", "trl.rewards:accuracy_reward", "trl.rewards.accuracy_reward"):
        return "math_verify"
    if ":" not in function and "." in function:
        module, _, function = function.rpartition(".")
        function = f"{module}:{function}"
    if ":" in function:
        return function
    where = f"environment.reward=my_code:{function}" if function.isidentifier() else "environment.reward=my_code:NAME"
    said = f"{function} is defined in the file itself, which nothing here runs: move it to my_code.py; {where}"
    to.person(f"reward_funcs {function}", said)
    return None
