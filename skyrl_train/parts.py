"""The built-in parts by seam: their names, where each is defined, and what it reads. Arguments stand with the part.

Which passes a run needs, and which columns travel, follows from what its parts read (`config/algorithm/settings.py`,
`config/derived/learners.py`), before anything that imports torch is loaded; a custom part declares the same with
`registry.reads`. A test computes every part from the columns that are declared here alone.
"""

from __future__ import annotations

from skyrl_train.declarations import Builtin, Reads, declared_parts
from skyrl_train.registry import Seam

_ADVANTAGES = "skyrl_train.algorithms.advantages"
_BASELINES = "skyrl_train.algorithms.baseline_advantages"


def _reads(*columns: str, tokenwise: bool = False, whole_groups: bool = False) -> Reads:
    return Reads(columns=frozenset(columns), tokenwise=tokenwise, whole_groups=whole_groups)


_GROUP = _reads(whole_groups=True)
_DISTILLED = frozenset({"old_logprobs", "ref_logprobs"})

ADVANTAGE_ESTIMATORS = Seam(
    "trainer.algorithm.advantage_estimator",
    {
        "gae": Builtin(f"{_ADVANTAGES}:gae", _reads("values")),
        "grpo": Builtin(f"{_ADVANTAGES}:grpo", _GROUP),
        "rloo": Builtin(f"{_ADVANTAGES}:rloo", _GROUP),
        "reinforce++": Builtin(f"{_ADVANTAGES}:reinforce_plus_plus", _reads()),
        "reinforce++_baseline": Builtin(f"{_ADVANTAGES}:reinforce_plus_plus_baseline", _GROUP),
        "maxrl": Builtin(f"{_ADVANTAGES}:maxrl", _GROUP),
        "opo": Builtin(f"{_ADVANTAGES}:opo", _GROUP),
        "remax": Builtin(f"{_BASELINES}:remax", _reads("greedy_rewards")),
        "grpo_pass_at_k": Builtin(f"{_BASELINES}:grpo_pass_at_k", _GROUP),
        "gpg": Builtin(f"{_BASELINES}:gpg", _GROUP),
        "optimal_token_baseline": Builtin(
            f"{_BASELINES}:optimal_token_baseline", _reads("old_logprobs", "sum_pi_squared", whole_groups=True)
        ),
        "gdpo": Builtin(f"{_BASELINES}:gdpo", _reads("reward_components", whole_groups=True)),
        "on_policy_distillation": Builtin(
            f"{_ADVANTAGES}:on_policy_distillation", Reads(columns=_DISTILLED, teacher="other_model")
        ),
        "self_distillation": Builtin(
            f"{_ADVANTAGES}:on_policy_distillation", Reads(columns=_DISTILLED, teacher="policy")
        ),
    },
    given=("inputs", "config"),
    readable=frozenset(
        {"old_logprobs", "ref_logprobs", "values", "sum_pi_squared", "greedy_rewards", "reward_components"}
    ),
    declares_arguments=True,
)
"""`(AdvantageInputs, AlgorithmConfig) -> AdvantageOutput`. A custom one that declares nothing is given all there is."""

POLICY_LOSSES = Seam(
    "trainer.algorithm.policy_loss",
    declared_parts("skyrl_train.algorithms.losses"),
    given=("inputs", "config"),
    readable=frozenset({"advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "values"}),
    undeclared=Reads(columns=frozenset({"advantages", "old_logprobs"}), declared=False),
    declares_arguments=True,
)
"""`(PolicyLossInputs, AlgorithmConfig) -> PolicyLossOutput`: the functions under `@reads` in `algorithms/losses/`."""

MICRO_BATCH_STRATEGIES = Seam(
    "trainer.micro_batching",
    {
        "fixed": Builtin("skyrl_train.batch.planner.forwards:fixed", settings="trainer.micro_train_batch_size_per_gpu"),
        "token_budget": Builtin(
            "skyrl_train.batch.planner.forwards:token_budget", settings="trainer.max_tokens_per_microbatch"
        ),
        "auto": Builtin(
            "skyrl_train.batch.planner.forwards:token_budget",
            _reads("memory_budget"),
            settings="trainer.memory_budget_gb",
        ),
    },
    given=("rows",),
    readable=frozenset({"memory_budget"}),
)
"""`(RowFacts) -> list[Forward]`; see `batch/planner/rows.py`."""

DATA_READERS = Seam(
    "data.reader",
    {
        "by_name": Builtin("skyrl_train.data.rows:by_name"),
        "jsonl": Builtin("skyrl_train.data.rows:read_jsonl"),
        "json": Builtin("skyrl_train.data.rows:read_json"),
        "csv": Builtin("skyrl_train.data.rows:read_csv"),
        "parquet": Builtin("skyrl_train.data.rows:read_parquet"),
        "arrow": Builtin("skyrl_train.data.rows:read_arrow"),
        "hub": Builtin("skyrl_train.data.sources.hub:read_hub"),
        "memory": Builtin("skyrl_train.objects:rows_at"),
        "reasoning_gym": Builtin("skyrl_train.data.tasks.reasoning_tasks:read_tasks", settings="data.reasoning_gym"),
        "harbor": Builtin("skyrl_train.rollout.adapters.harbor_tasks:read_tasks"),
    },
    given=("location",),
)
"""`(an entry of data.train or data.validation) -> rows`, each a mapping of columns to values; see `data/rows.py`."""

REASONING_TASKS = Seam("data.reasoning_gym.tasks", {}, names_elsewhere=True)
"""Tasks of the package reasoning-gym, which are looked up where rows are made: `data/tasks/reasoning_tasks.py`."""

ROW_FORMATS = Seam(
    "data.row_format",
    {
        "prompt": Builtin("skyrl_train.data.prompts:own_columns"),
        "gsm8k": Builtin("skyrl_train.data.prompts:published_gsm8k_row"),
    },
    given=("row",),
)
"""`(Row) -> columns`: see `data/prompts.py`."""

ENVIRONMENTS = Seam(
    "environment.env_class",
    {
        "word_problems": Builtin("skyrl_train.rollout.envs.word_problems:WordProblemsEnv"),
        "single_turn": Builtin("skyrl_train.rollout.rewards.reward_functions:SingleTurn"),
        "reported": Builtin("skyrl_train.rollout.rewards.reward_functions:Reported"),
        "harbor": Builtin("skyrl_train.rollout.adapters.harbor_tasks:HarborTask"),
    },
    names_elsewhere=True,
)
"""`(env_config=..., extras=...) -> Environment`. Names of skyrl-gym's registry are added in
`rollout/envs/environments.py`."""

TOOLS = Seam(
    "environment.tools",
    {"mcp": Builtin("skyrl_train.rollout.tools.mcp:McpServer")},
    names_elsewhere=True,
)
"""A function that is a tool, or what makes some; see `rollout/tools/toolbox.py`, which checks them."""

_READY_MADE = "skyrl_train.rollout.rewards.ready_made"
REWARDS = Seam(
    "environment.rewards",
    {
        "exact_match": Builtin(f"{_READY_MADE}:exact_match"),
        "choice": Builtin(f"{_READY_MADE}:choice"),
        "math_verify": Builtin(f"{_READY_MADE}:math_verify"),
        "json_schema": Builtin(f"{_READY_MADE}:JsonSchema"),
        "regex": Builtin(f"{_READY_MADE}:Regex"),
        "code": Builtin(f"{_READY_MADE}:code"),
        "length_penalty": Builtin(f"{_READY_MADE}:LengthPenalty"),
        "not_stopped_penalty": Builtin(f"{_READY_MADE}:not_stopped_penalty"),
        "judge": Builtin(
            "skyrl_train.rollout.rewards.judge:Judge",
            free=frozenset({"url", "max_concurrency", "max_retries", "timeout_s", "cache", "price", "api_key_env"}),
        ),
        "model": Builtin(
            "skyrl_train.rollout.rewards.model:RewardModel",
            free=frozenset(
                {"placement", "device", "max_batch_tokens", "url", "timeout_s", "max_retries", "api_key_env"}
            ),
        ),
    },
    names_elsewhere=True,
)
"""`(completion=..., columns by name ...) -> float, {name: float} or None`; `rollout/rewards/__init__.py` has the contract.
They are checked where they run, together with the columns of the data: `rollout/hosts/scoring.py`."""

_KL = "skyrl_train.algorithms.losses.kl"
KL_ESTIMATORS = Seam(
    "trainer.algorithm.kl_estimator",
    {
        "k1": Builtin(f"{_KL}:k1"),
        "k2": Builtin(f"{_KL}:k2"),
        "k3": Builtin(f"{_KL}:k3"),
        "abs": Builtin(f"{_KL}:absolute"),
    },
    given=("logprobs", "ref_logprobs"),
)
"""`(logprobs, ref_logprobs) -> KL`, all of one shape (any), with the gradient through both; see
`algorithms/losses/kl.py`."""

_MINI_BATCH = "skyrl_train.batch.steps.minibatch"
LOSS_REDUCTIONS = Seam(
    "trainer.algorithm.loss_reduction",
    {
        "token_mean": Builtin(f"{_MINI_BATCH}:token_mean"),
        "sequence_mean": Builtin(f"{_MINI_BATCH}:sequence_mean"),
        "seq_mean_token_sum_norm": Builtin(f"{_MINI_BATCH}:seq_mean_token_sum_norm"),
        "prompt_mean": Builtin(f"{_MINI_BATCH}:prompt_mean"),
    },
    given=("counts",),
)
"""`(RowCounts) -> [num_rows]`: the weight of each of a row's tokens; what it says of rows without loss is ignored."""

CRITIC_LOSSES = Seam(
    "trainer.algorithm.critic_loss",
    {"clipped": Builtin("skyrl_train.algorithms.losses.critic:value_loss")},
    given=("inputs", "config"),
    declares_arguments=True,
)
"""`(ValueLossInputs, AlgorithmConfig) -> PolicyLossOutput`."""

STRATEGIES = Seam(
    "strategy.name",
    {
        "single": Builtin("skyrl_train.distributed.strategy:single"),
        "ddp": Builtin("skyrl_train.distributed.strategy:ddp"),
        "fsdp2": Builtin("skyrl_train.distributed.strategy:fsdp2"),
    },
    given=("ranks",),
)
"""`(RankContext) -> ModelStrategy`, on each rank; see `distributed/strategy.py`."""

MODEL_LOADERS = Seam(
    "model.loader",
    {"transformers": Builtin("skyrl_train.model.causal_lm:from_pretrained")},
    given=("folder", "dtype", "model"),
)
"""`(folder, dtype, ModelConfig) -> (causal language model on the CPU, names of parameters that its weights lack)`."""

OPTIMIZERS = Seam(
    "optimizer.name",
    {"adamw": Builtin("skyrl_train.learner.optimizer:adamw"), "sgd": Builtin("skyrl_train.learner.optimizer:sgd")},
    given=("groups", "config"),
)
"""`(groups, OptimizerConfig) -> torch.optim.Optimizer`, of one whose update of an element reads that element alone: each
rank of a sharded model updates a part of each tensor."""

SCHEDULES = Seam(
    "optimizer.schedule",
    {
        "constant": Builtin("skyrl_train.batch.steps.schedule:constant"),
        "linear": Builtin("skyrl_train.batch.steps.schedule:linear"),
        "cosine": Builtin("skyrl_train.batch.steps.schedule:cosine"),
    },
    given=("progress", "floor"),
)
"""`(progress, floor) -> factor` on the peak learning rate: progress runs from 0 to 1 after the warm-up, floor is
`min_lr_ratio`."""

METRICS = Seam("trainer.metrics", {}, given=("facts",))
"""`(StepFacts) -> {name: Metric}`; see `trainers/observers.py`."""

CALLBACKS = Seam("trainer.callbacks", {}, given=("event",))
"""`(RunEvent) -> None`; see `trainers/observers.py`."""

ALERTS = Seam("alerts.on_alert", {}, given=("alert",))
"""`(Alert) -> None`; see `telemetry/alerts.py`."""

TRACKERS = Seam("tracker.custom", {}, given=("folder",))
"""`(folder of the run) -> Tracker`."""

ENGINES = Seam(
    "generator.backend",
    {
        "hf": Builtin("skyrl_train.inference.hf:build_hf_engine", Reads(in_flight_updates=True)),
        "vllm": Builtin(
            "skyrl_train.inference.vllm.engine:VLLMEngine",
            Reads(own_devices=True, in_flight_updates=True),
            settings="generator.vllm",
        ),
        "http": Builtin("skyrl_train.inference.http:build_http_engine", settings="generator.http"),
        "replay": Builtin("skyrl_train.rollout.stream.replay:ReplayGenerator", settings="generator.replay_path"),
    },
    given=("settings", "tokenizer"),
    methods=("async generate", "lease", "close", "load_weights|update"),
)
"""`(EngineSettings, tokenizer) -> InferenceEngine`, either with `load_weights(weights, version)` or derived from
`weight_sync/receiver.py: UpdatableEngine`; replay reads recordings in place of an engine."""

WEIGHT_TRANSPORTS = Seam(
    "generator.weight_transport",
    {
        name: Builtin(f"skyrl_train.weight_sync.transports:{name}")
        for name in ("auto", "shared_memory", "broadcast", "cuda_ipc", "files")
    },
    given=("route", "buckets"),
)
"""`(Route, buckets) -> None`; see `weight_sync/transports.py`."""

TRAJECTORY_ROWS = Seam(
    "generator.trajectory_rows",
    {
        "per_trajectory": Builtin("skyrl_train.batch.assembly:per_trajectory"),
        "per_turn": Builtin("skyrl_train.batch.assembly:per_turn"),
    },
    given=("trajectory",),
)
"""`(Trajectory) -> sequences of its turns`, one for each training row: every turn in one of them, in order."""

ROLLOUT_FILTERS = Seam("trainer.algorithm.filters.keep", {}, given=("rollouts",))
"""`(RolloutBatch) -> bools`, one for each trajectory: whether it is trained on."""

BATCH_RULES = Seam(
    "trainer.batch_rules",
    {"sizes": Builtin("skyrl_train.config.rules.validate_batch:batch_size_violations")},
    given=("config", "refused"),
)
"""`(Config, names of settings that were refused) -> Violations`."""

PROMPT_ORDERS = Seam(
    "data.order",
    {"by_seed": Builtin("skyrl_train.data.prompts:by_seed")},
    given=("num_prompts", "epoch", "seed"),
)
"""`(number of prompts, epoch, seed) -> their numbers in the order of that epoch`: a pure function of the three."""

AGENT_LOOPS = Seam(
    "generator.agent_loop",
    {
        "multi_turn": Builtin("skyrl_train.rollout.agent_loop:multi_turn"),
        "agent": Builtin(
            "skyrl_train.rollout.agents.loop:agent", free=frozenset({"url", "host", "time_limit_s", "launcher"})
        ),
    },
    given=("episode",),
)
"""`async (Episode) -> Trajectory`; see `rollout/agent_loop.py`."""

_LAUNCHERS = "skyrl_train.rollout.agents.launchers"
LAUNCHERS = Seam(
    "generator.agent_loop.launcher",
    {name: Builtin(f"{_LAUNCHERS}:{name}") for name in ("docker", "podman", "bubblewrap", "template")},
)
"""`() -> Launcher`: what a command of the agent loop `agent` runs in; see `rollout/agents/launchers.py`."""
