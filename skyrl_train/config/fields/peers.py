"""What other trainers call a setting, and what does the same here: read where somebody types a name that this project lacks.

`python scripts/make_migration_page.py` writes the tables of `docs/migrating.md` from the table; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

TRAINERS: Mapping[str, str] = {
    "trl": "TRL and transformers",
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "skyrl": "SkyRL",
    "prime": "prime-rl",
    "vllm": "vLLM",
    "any": "anywhere",
}
"""What the table calls a trainer, and its name."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """What names of other trainers are here."""

    settings: tuple[str, ...]
    """Dotted names; which one is meant depends on the kind of run and on what was typed before the name. Or a choice of a
    group, `tracker=wandb`. Empty where nothing is to be set."""
    convert: str
    """A sentence on the value, where it is not the same, or on what to do where there is no setting."""
    names: Mapping[str, tuple[str, ...]]
    """By a key of `TRAINERS`."""


_IN_PROMPTS = "It counts prompts: divide a number of samples by generator.n_samples_per_prompt"
_PER_DEVICE = "It counts the rows of one device: divide by the number of devices"
_ABOVE_0 = "For true write a weight above 0, for false 0"
_OR_AUTO = "Or leave placement.auto=true, which chooses for the GPUs there are"
_KEPT = "always: every rollout is written to rollouts/, which rollouts.keep_last limits; drop it"
_LENGTH = (
    "generator.sampling.max_generate_length generator.eval_sampling.max_generate_length "
    "trainer.eval_sampling.max_generate_length"
)
_OPTIMIZER = "trainer.policy.optimizer.{0} critic.optimizer.{0} trainer.optimizer.{0}"
_TABLE = f"""
generator.n_samples_per_prompt | trl num_generations; verl rollout.n; prime rollouts_per_example group_size; vllm n
generator.eval_n_samples_per_prompt | trl num_generations_eval; verl val_kwargs.n; prime eval.rollouts_per_example
  openrlhf eval.n_samples_per_prompt
trainer.train_batch_size trainer.batch_size | trl generation_batch_size; prime batch_size; any batch_size
  = {_IN_PROMPTS}
trainer.train_batch_size | openrlhf rollout.batch_size rollout_batch_size
trainer.policy_mini_batch_size | verl ppo_mini_batch_size
trainer.policy_mini_batch_size | openrlhf train.batch_size
  = {_IN_PROMPTS}
trainer.policy_mini_batch_size | trl steps_per_generation
  = It counts the prompts of an optimizer step: divide trainer.train_batch_size by that number of steps
trainer.policy_mini_batch_size trainer.batch_size | trl gradient_accumulation_steps
  = It counts the prompts of an optimizer step; how many micro-batches they make follows
trainer.micro_train_batch_size_per_gpu | trl per_device_train_batch_size; verl ppo_micro_batch_size_per_gpu
  verl micro_batch_size_per_gpu; openrlhf train.micro_batch_size micro_train_batch_size
trainer.micro_train_batch_size_per_gpu | verl ppo_micro_batch_size
  = {_PER_DEVICE}
trainer.micro_forward_batch_size_per_gpu | verl log_prob_micro_batch_size_per_gpu forward_micro_batch_size_per_gpu
  openrlhf rollout.micro_batch_size micro_rollout_batch_size
trainer.micro_forward_batch_size_per_gpu | verl log_prob_micro_batch_size forward_micro_batch_size
  = {_PER_DEVICE}
trainer.max_tokens_per_microbatch | verl ppo_max_token_len_per_gpu max_token_len_per_gpu
  openrlhf train.max_tokens_per_gpu train_max_tokens_per_gpu
trainer.max_tokens_per_forward_microbatch | verl log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu
  openrlhf rollout.max_tokens_per_gpu rollout_max_tokens_per_gpu
trainer.micro_batching | verl use_dynamic_bsz log_prob_use_dynamic_bsz; openrlhf dynamic_batch_enable use_dynamic_batch
  = For true write token_budget, for false fixed
trainer.micro_batching | trl auto_find_batch_size
  = For true write auto
trainer.eval_batch_size | trl per_device_eval_batch_size; verl val_batch_size
  = It counts prompts, over all devices
trainer.update_epochs_per_batch | trl num_iterations; verl ppo_epochs
trainer.update_epochs_per_batch trainer.num_epochs | openrlhf max_epochs
trainer.epochs trainer.num_epochs | trl num_train_epochs; verl total_epochs; openrlhf num_episodes
trainer.total_steps trainer.num_steps | trl max_steps; verl total_training_steps; skyrl max_training_steps; prime max_steps
  = For -1 or null write 0, which derives it from the epochs
{_LENGTH} | trl max_completion_length max_new_tokens; verl max_response_length response_length; vllm max_tokens
  openrlhf max_new_tokens generate_max_len; prime max_completion_tokens max_tokens
  = It counts the new tokens of one turn; generator.max_context_length bounds all turns together
generator.max_context_length data.max_length | trl vllm_max_model_length max_length; openrlhf max_len; prime seq_len
  vllm max_model_len
generator.max_context_length | skyrl max_input_length
  = It counts prompt, responses and observations together: add the length of the last response
data.max_prompt_length | verl prompt_length; openrlhf prompt_max_len
data.over_long | verl filter_overlong_prompts
  = For true write drop, for false error
data.over_long | verl truncation
  = It is drop or error: a prompt is never cut
{_OPTIMIZER.format("lr")} | trl learning_rate; any lr; openrlhf adam.lr actor_learning_rate
critic.optimizer.lr | openrlhf critic_learning_rate
{_OPTIMIZER.format("name")} | trl optim; verl optim.optimizer; prime optim.type
  = Names such as adamw_torch are adamw
{_OPTIMIZER.format("betas")} | trl adam_beta1 adam_beta2; openrlhf adam_betas; skyrl adam_betas; prime betas1 betas2
  = It is a list of both, e.g. [0.9,0.95]
{_OPTIMIZER.format("eps")} | trl adam_epsilon
{_OPTIMIZER.format("weight_decay")} | openrlhf l2
{_OPTIMIZER.format("max_grad_norm")} | verl clip_grad grad_clip; openrlhf max_norm; prime max_norm
{_OPTIMIZER.format("warmup_steps")} | verl lr_warmup_steps; skyrl num_warmup_steps
  = For -1 write 0
{_OPTIMIZER.format("warmup_steps")} | trl warmup_ratio; verl lr_warmup_steps_ratio; openrlhf lr_warmup_ratio
  = It counts optimizer steps: multiply the ratio by their number
{_OPTIMIZER.format("schedule")} | trl lr_scheduler_type; verl lr_scheduler_type; openrlhf lr_scheduler
  skyrl scheduler; prime scheduler.type
  = It is constant, linear or cosine; warm-up and the last rate are settings beside it
{_OPTIMIZER.format("min_lr_ratio")} | prime min_lr
  = It is a share of the peak rate: divide by it
model.path | trl model_name_or_path; openrlhf model_name_or_path pretrain; prime model.name
critic.model.path | openrlhf critic.model_name_or_path critic_pretrain
model.revision | trl model_revision
model.tokenizer_path | prime tokenizer.name
model.dtype | trl torch_dtype; verl model_dtype; openrlhf param_dtype
  = It is float32 or bfloat16
model.dtype | trl bf16; openrlhf bf16; skyrl bf16
  = For true write bfloat16, for false float32
model.dtype | trl fp16
  = There is no float16: write bfloat16 or float32
model.attention | trl attn_implementation; openrlhf attn_implementation; prime attn
model.attention | skyrl flash_attn
  = For true write flash_attention_2
model.gradient_checkpointing | verl enable_gradient_checkpointing; openrlhf gradient_checkpointing_enable; prime model.ac
  = It is true, false or auto
model.compile | trl torch_compile; verl use_torch_compile; skyrl use_torch_compile
model.lora.rank | trl lora_r; verl lora_rank; openrlhf lora_rank
model.lora.rank | trl use_peft
  = For true write a rank above 0, e.g. 16
model.lora.alpha | trl lora_alpha; verl lora_alpha; openrlhf lora_alpha
model.lora.dropout | trl lora_dropout; openrlhf lora_dropout
model.lora.targets | trl lora_target_modules; verl target_modules; openrlhf target_modules; skyrl target_modules
  prime target_modules
model.quantization | trl load_in_4bit; openrlhf load_in_4bit
  = For true write nf4, for false none
model.freeze | verl freeze_vision_tower; openrlhf freeze_visual_encoder
  = For true write [vision], for false []
trainer.layout | trl packing padding_free; verl use_remove_padding; openrlhf packing_samples; skyrl remove_microbatch_padding
  = For true write packed, for false padded; auto takes the one that needs less time
trainer.algorithm.advantage_estimator | verl adv_estimator; openrlhf advantage.estimator
trainer.algorithm.normalize_by_std | verl norm_adv_by_std_in_grpo; skyrl grpo_norm_by_std
trainer.algorithm.normalize_by_std | trl scale_rewards
  = For group write true, for none false
trainer.algorithm.normalize_by_std | openrlhf no_std_norm no_advantage_std_norm
  = It says the opposite: for true write false
trainer.algorithm.normalize_advantages | skyrl advantage_batch_normalize
trainer.algorithm.advantage_estimator={{_target_:gae,gae_lambda:VALUE}} | verl lam; openrlhf lambd; skyrl lambd
trainer.algorithm.policy_loss | verl loss_mode; openrlhf policy_loss_type; skyrl policy_loss_type
  = The plain clipped loss, vanilla or ppo elsewhere, is regular
trainer.algorithm.loss_reduction | verl loss_agg_mode; openrlhf loss_agg_mode
  = It is token_mean for token-mean, sequence_mean for seq-mean-token-mean; docs/algorithms.md lists all
trainer.algorithm.loss_reduction | trl loss_type
  = It is token_mean for dapo, sequence_mean for grpo; other losses are presets, e.g. algorithm=dr_grpo
trainer.algorithm.max_sequence_length_for_norm | verl loss_scale_factor; skyrl max_seq_len
algorithm=gspo | trl importance_sampling_level
  = That is sequence; for token nothing is set
trainer.algorithm.eps_clip_low | trl epsilon; verl clip_ratio; openrlhf eps_clip
  = Set trainer.algorithm.eps_clip_high as well: it does not follow
trainer.algorithm.eps_clip_low | verl clip_ratio_low; skyrl cispo_eps_clip_low delta_low
trainer.algorithm.eps_clip_high | trl epsilon_high; verl clip_ratio_high; skyrl cispo_eps_clip_high delta_high
trainer.algorithm.eps_clip_low | openrlhf eps_clip_low_high
  = That is its first value; trainer.algorithm.eps_clip_high is the second
trainer.algorithm.policy_loss={{_target_:dual_clip,clip_ratio_c:VALUE}} | trl delta; verl clip_ratio_c
  openrlhf dual_clip; skyrl clip_ratio_c
trainer.algorithm.policy_loss={{_target_:sapo,tau_pos:VALUE}} | trl sapo_temperature_pos; verl tau_pos; skyrl tau_pos
trainer.algorithm.policy_loss={{_target_:sapo,tau_neg:VALUE}} | trl sapo_temperature_neg; verl tau_neg; skyrl tau_neg
trainer.algorithm.policy_loss={{_target_:clip_cov,share:VALUE}} | verl clip_cov_ratio; skyrl clip_cov.clip_ratio
trainer.algorithm.policy_loss={{_target_:clip_cov,low:VALUE}} | verl clip_cov_lb; skyrl clip_cov_lb
trainer.algorithm.policy_loss={{_target_:clip_cov,high:VALUE}} | verl clip_cov_ub; skyrl clip_cov_ub
trainer.algorithm.policy_loss={{_target_:kl_cov,share:VALUE}} | verl kl_cov_ratio; skyrl kl_cov_frac
trainer.algorithm.policy_loss={{_target_:kl_cov,coef:VALUE}} | verl ppo_kl_coef; skyrl ppo_kl_coef
trainer.algorithm.policy_loss={{_target_:dppo,divergence:VALUE}} | skyrl dppo_type
  = For binary_tv write tv, for binary_kl kl
trainer.algorithm.kl_loss_coef | trl beta
trainer.algorithm.kl_loss_coef | any kl_coef; openrlhf kl.init_coef init_kl_coef
  = That is the KL in the loss; trainer.algorithm.kl_reward_coef is the KL in the reward
trainer.algorithm.kl_loss_coef | verl use_kl_loss; openrlhf kl.use_loss use_kl_loss; skyrl use_kl_loss
  = {_ABOVE_0}
trainer.algorithm.kl_reward_coef | verl use_kl_in_reward; skyrl use_kl_in_reward
  = {_ABOVE_0}
trainer.algorithm.kl_reward_coef | verl kl_ctrl.kl_coef
trainer.algorithm.kl_estimator | verl kl_loss_type kl_penalty; openrlhf kl.estimator; skyrl kl_estimator_type
  = For low_var_kl write k3, for mse k2, for kl k1
trainer.algorithm.kl_controller | verl kl_ctrl.type; skyrl kl_ctrl.type
trainer.algorithm.kl_target | verl target_kl; openrlhf kl.target
trainer.algorithm.kl_horizon | verl kl_ctrl.horizon; openrlhf kl.horizon; skyrl kl_ctrl.horizon
trainer.algorithm.kl_bias_correction | trl use_bias_correction_kl
trainer.algorithm.ref_update_interval | trl ref_model_sync_steps
trainer.algorithm.ref_update_interval | trl sync_ref_model
  = For true write a number of training batches above 0
trainer.algorithm.ref_update_interval | skyrl update_ref_every_epoch
  = For true write the training batches of an epoch
trainer.algorithm.entropy_coef | verl entropy_coeff; skyrl entropy_loss_coef
trainer.algorithm.entropy_coef | skyrl use_entropy_loss
  = {_ABOVE_0}
trainer.algorithm.entropy_controller | trl use_adaptive_entropy
  = For true write adaptive
trainer.algorithm.entropy_quantile | trl top_entropy_quantile
  = It is the share that is left out: write 0.8 for 0.2
trainer.algorithm.critic_loss={{_target_:clipped,value_clip:VALUE}} | verl cliprange_value
trainer.algorithm.critic_warmup_steps | verl critic_warmup; openrlhf freezing_steps freezing_actor_steps
trainer.algorithm.proximal | verl bypass_mode
  = For true write behaviour
trainer.algorithm.off_policy.weight | trl vllm_importance_sampling_correction
  = For true nothing is set, for false write none
trainer.algorithm.off_policy.weight | verl rollout_is; openrlhf is_correction_level enable_vllm_is_correction
  skyrl tis_ratio_type use_tis
  = It is token or sequence; auto, the default, corrects as well
trainer.algorithm.off_policy.weight_mode | trl vllm_importance_sampling_mode; openrlhf is_correction_mode
  = It is truncate or mask; trainer.algorithm.off_policy.weight says of what
trainer.algorithm.off_policy.weight_high | trl vllm_importance_sampling_clip_max vllm_importance_sampling_cap
  verl rollout_is_threshold; skyrl token_tis_ratio_clip_high sequence_tis_ratio_clip_high tis_imp_ratio_cap
  openrlhf vllm_is_truncated_threshold
trainer.algorithm.off_policy.weight_low | trl vllm_importance_sampling_clip_min
trainer.algorithm.off_policy.batch_normalize | verl rollout_is_batch_normalize
trainer.algorithm.off_policy.reject | verl rollout_rs rollout_rs_threshold
  = It is a mapping of both, e.g. {{sequence_mean_k3: 0.01}}
trainer.algorithm.off_policy.sequence_mask | skyrl sequence_mask_metric
trainer.algorithm.off_policy.sequence_mask_low | skyrl geo_mask_low product_mask_low
trainer.algorithm.off_policy.sequence_mask_high | skyrl geo_mask_high product_mask_high
trainer.algorithm.off_policy.outlier_low | skyrl outlier_token_is_threshold_low
trainer.algorithm.off_policy.outlier_high | skyrl outlier_token_is_threshold_high
trainer.algorithm.off_policy.negative_kl_max | trl off_policy_mask_threshold
trainer.algorithm.filters.overlong | trl mask_truncated_completions; skyrl apply_overlong_filtering
trainer.algorithm.filters.overlong_soft_share | openrlhf overlong_buffer_len
  = It is a share: divide by trainer.algorithm.filters.overlong_max_length
trainer.algorithm.filters.overlong_penalty | openrlhf overlong_penalty_factor
trainer.algorithm.filters.non_stop_scale | openrlhf stop_properly_penalty_coef
  = For a value below 0 write 0, and its size as trainer.algorithm.filters.non_stop_penalty
trainer.algorithm.filters.dynamic_sampling | verl filter_groups filter_groups.enable
  openrlhf dynamic_filtering_enable dynamic_filtering; skyrl dynamic_sampling.type; prime online_difficulty_filtering
  = For true write filter, for false none
trainer.algorithm.filters.dynamic_sampling_max_batches | verl max_num_gen_batches; skyrl max_sample_batches
trainer.algorithm.filters.replace_min_share | skyrl min_replace_ratio
trainer.algorithm.filters.zero_variance | skyrl zero_variance_filter
trainer.algorithm.filters.resample | verl reweight_method
trainer.algorithm.filters.resample_power | verl weight_pow
trainer.max_staleness | skyrl max_staleness_steps; prime max_off_policy_steps max_async_level
trainer.max_staleness | openrlhf async_enable async_train
  = For true write 1
trainer.oversample | prime oversampling_factor
trainer.in_flight_updates | openrlhf partial_rollout_enable
trainer.in_flight_cache | skyrl clear_kv_cache_on_weight_sync
  = For true write recompute, for false keep
trainer.moe_routing_replay | verl enable_rollout_routing_replay; skyrl moe_enable_routing_replay; prime enable_router_replay
generator=vllm | trl use_vllm
  = For false write generator=hf
generator.backend | verl rollout.name
placement.colocate_all | trl vllm_mode
  = For colocate write true, for server false
placement.colocate_all | openrlhf colocate_all_models
placement.colocate_policy_ref | openrlhf colocate_actor_ref
generator.vllm.gpu_memory_utilization | trl vllm_gpu_memory_utilization; openrlhf vllm_gpu_memory_utilization
generator.vllm.tensor_parallel_size | trl vllm_tensor_parallel_size; verl tensor_model_parallel_size
  openrlhf vllm_tensor_parallel_size; prime parallel.tp
generator.vllm.num_engines | openrlhf vllm_num_engines; vllm data_parallel_size; prime parallel.dp
generator.vllm.prefix_caching | vllm enable_prefix_caching; verl enable_prefix_caching
generator.vllm.engine_args | skyrl engine_init_kwargs; verl engine_kwargs
  vllm max_num_batched_tokens enable_chunked_prefill kv_cache_dtype speculative_config
  = It is a mapping of what vLLM takes, e.g. {{max_num_batched_tokens: 8192}}
generator.http.url | trl vllm_server_base_url; skyrl external_proxy_url; prime client.base_url
generator.request_timeout_s | prime client.timeout
generator.weight_transport | skyrl weight_sync_backend; openrlhf vllm.sync_backend vllm_sync_backend
  = auto takes the fastest that works
generator.merge_stepwise | skyrl merge_stepwise_output
  = For true write auto, for false off
generator.max_turns | trl max_tool_calling_iterations; verl max_assistant_turns
generator.agent_loop | verl default_agent_loop; openrlhf agent_func_path
generator.sampling.temperature generator.eval_sampling.temperature | trl do_sample; verl do_sample
  = For false write 0
generator.eval_sampling.temperature | verl val_kwargs.temperature; openrlhf eval.temperature eval_temperature
generator.eval_sampling.top_p | verl val_kwargs.top_p
generator.eval_sampling.top_k | verl val_kwargs.top_k
- | trl repetition_penalty; prime repetition_penalty; vllm repetition_penalty presence_penalty frequency_penalty
  = there is none: tokens are drawn from the distribution that is trained; drop it
- | verl calculate_log_probs; vllm logprobs
  = always: the log-probability of each sampled token is kept; drop it
data.template_kwargs | trl chat_template_kwargs; verl apply_chat_template_kwargs
data.train | trl dataset_name; verl train_files; openrlhf prompt_dataset prompt_data; skyrl train_data
  = It is a list of files, folders or names on the hub, e.g. [owner/name:train]
data.validation | verl val_files; openrlhf eval.dataset eval_dataset; skyrl val_data
  = It is a list of files, folders or names on the hub, e.g. [owner/name:test]
data.prompt_column | verl prompt_key; openrlhf input_key
data.answer_column | openrlhf label_key
data.completion_column | openrlhf output_key
data.max_train_prompts data.max_train_rows | verl train_max_samples; openrlhf max_samples
  = For -1 write 0, which is all
data.max_validation_prompts data.max_validation_rows | verl val_max_samples; prime eval.num_examples
  = For -1 write 0, which is all
data.mix data.weights | openrlhf prompt_probs; prime env_ratios
  = It is a list of {{train: FILE, weight: 0.7}}
data.shuffle | trl shuffle_dataset
data.images.column | verl image_key; openrlhf image_key
- | trl remove_unused_columns
  = not needed: rewards and environments get all columns of a row; drop it
environment.rewards | trl reward_funcs reward_weights
  = It is a list of functions, or of {{_target_: my_code:f, weight: 0.5}}
environment.reward | verl custom_reward_function custom_reward_function.path custom_reward_function.name
  openrlhf remote_url remote_rm_url
  = Name a function, my_code:compute_score or my_code.py:compute_score
environment.reward | openrlhf reward.model_name_or_path reward_pretrain
  = Write {{_target_: model, path: NAME}}
environment.num_workers | skyrl max_env_workers
environment.tools | verl tool_config_path function_tool_path
  = It is a list of functions, e.g. [my_code:calculator]
environment.tool_format | verl multi_turn.format
environment.max_tool_result_chars | verl max_tool_response_length
output_dir | verl default_local_dir; openrlhf ckpt.path ckpt.output_dir ckpt_path save_path; skyrl ckpt_path export_path
  any run_dir
run_name | verl experiment_name; openrlhf wandb.run_name wandb_run_name; prime wandb.name
tracker.wandb.project | verl project_name; openrlhf wandb_project; skyrl project_name
tracker.wandb.entity | openrlhf wandb.org wandb_org
tracker.wandb.group | openrlhf wandb_group
tracker.wandb.samples | verl log_val_generations; skyrl num_logger_eval_samples
  = For -1 write 0
tracker=wandb | trl report_to; verl logger; openrlhf use_wandb; skyrl logger; any wandb
  = More than one: tracker=[console,wandb]
tracker.prometheus.enabled | prime metrics_server
- | trl log_completions; verl rollout_data_dir validation_data_dir; skyrl dump_data_batch dump_eval_results
  = {_KEPT}
- | trl logging_steps logging_strategy logging_first_step; openrlhf logging_steps
  = always: every step is a record of metrics.jsonl and of the trackers; drop it
trainer.ckpt_interval | trl save_steps; verl save_freq; openrlhf save_steps; prime ckpt.interval
  = For -1 or null write 0, which saves at the end
trainer.ckpt_interval | trl save_strategy
  = It is a number of steps, or 0, which saves at the end
trainer.max_ckpts_to_keep | trl save_total_limit; verl max_actor_ckpt_to_keep max_critic_ckpt_to_keep; prime ckpt.keep_last
  openrlhf ckpt.max_num max_ckpt_num
trainer.eval_interval | trl eval_steps; verl test_freq; openrlhf eval.steps eval_steps; prime eval.interval
  = For -1 or null write 0, which evaluates before and after
trainer.eval_interval | trl eval_strategy
  = It is a number of steps, or 0, which evaluates before and after
trainer.eval_before_train | trl eval_on_start; verl val_before_train; prime eval_base_model
trainer.resume_path | trl resume_from_checkpoint; verl resume_from_path
  = Add trainer.resume_mode=from_path; a run goes on in its own output_dir without either
trainer.resume_mode | openrlhf ckpt.load_enable load_checkpoint; prime resume_step
  = latest, the default, goes on from the last checkpoint
trainer.keep_best | trl load_best_model_at_end
trainer.background_checkpoints | verl async_save
trainer.export_hf | openrlhf save_hf save_hf_ckpt
trainer.export_hf | skyrl hf_save_interval
  = For a number above 0 write true: the final policy is written to export/
- | trl push_to_hub hub_model_id
  = not done here: upload the run's folder export/ with `hf upload`
deterministic | trl full_determinism; verl full_determinism; openrlhf full_determinism_enable full_determinism
seed | trl data_seed
strategy=fsdp2 | trl fsdp fsdp_config deepspeed; openrlhf zero_stage
strategy.name | verl actor.strategy; skyrl trainer.strategy
  = For fsdp write fsdp2
strategy.cpu_offload | verl offload_policy param_offload; prime fsdp_cpu_offload
strategy.cpu_offload | verl optimizer_offload; openrlhf adam_offload; skyrl offload_after_step; prime optim_cpu_offload
  = For true write optimizer
strategy.sequence_parallel_size | verl ulysses_sequence_parallel_size; openrlhf ring_attn_size; prime model.cp
strategy.tensor_parallel_size | openrlhf ds_tensor_parallel_size; prime model.tp
strategy.expert_parallel_size | prime model.ep
placement.policy_num_gpus_per_node | verl n_gpus_per_node; openrlhf actor.num_gpus_per_node actor_num_gpus_per_node
  = {_OR_AUTO}
placement.policy_num_nodes | verl nnodes; openrlhf actor.num_nodes actor_num_nodes
  = {_OR_AUTO}
placement.call_timeout_s | trl ddp_timeout; verl nccl_timeout; prime dist_timeout_seconds
"""
"""`SETTINGS | TRAINER NAMES; TRAINER NAMES`, and in lines below that are indented more of these, or `= ` and a sentence."""


def _rows() -> Iterator[Here]:
    for block in _TABLE.strip().replace("\n  ", "\r").split("\n"):
        first, *below = block.split("\r")
        settings, _, names = first.partition(" | ")
        told = [line for line in below if line.startswith("= ")]
        called: dict[str, tuple[str, ...]] = {}
        for each in "; ".join([names, *(line for line in below if line not in told)]).split("; "):
            trainer, *theirs = each.split()
            called[trainer] = (*called.get(trainer, ()), *theirs)
        yield Here(
            settings=tuple(name for name in settings.split() if name != "-"),
            convert=told[0].removeprefix("= ") if told else "",
            names=called,
        )


ROWS: tuple[Here, ...] = tuple(_rows())
"""In the order of the table."""
PEER_NAMES: Mapping[str, Here] = {name: here for here in ROWS for names in here.names.values() for name in names}
"""By the last part of a dotted name, whatever stands before it, or by its last two parts."""


def peer_name(path: str) -> Here | None:
    """Return what other trainers' name at the end of a dotted `path` is here; None for a name that they lack, too."""
    parts = path.split(".")
    return PEER_NAMES.get(".".join(parts[-2:])) or PEER_NAMES.get(parts[-1])


def peer_setting(path: str, settings: Iterable[str]) -> tuple[str, str]:
    """Return what an unknown `path` is among `settings`, and how to convert its value; empty where nothing is known of it.
    Without a setting, but with a sentence: nothing is to be set, and the sentence says why.

    Of several the one that shares most parts with `path`, then the first.
    """
    here, parts = peer_name(path), path.split(".")
    if here is None or not here.settings:
        return "", here.convert if here else ""
    existing = {*settings}
    meant = [each for each in here.settings if each in existing or "=" in each]
    if not meant:
        return "", ""
    name = max(meant, key=lambda each: len({*parts} & {*each.split(".")}))
    return name, here.convert if name == here.settings[0] else ""
