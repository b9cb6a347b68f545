"""Settings of another trainer become ours: names by the table of `config/fields/peers.txt`, which the errors and
docs/migrating.md are made of, too; what several names say together by the functions below and in `from_*.py`.

A value is taken where the schema accepts it. What would be refused, what the table's sentence asks a person to convert, and
a second, other value for one setting are listed instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from skyrl_train.config import Config, RunConfig
from skyrl_train.config.door import read_root
from skyrl_train.config.fields import Here, peer_rows, walk
from skyrl_train.registry import TARGET
from skyrl_train.runs.cli.foreign_files import Given

_BEFORE: Mapping[str, Sequence[tuple[str, str]]] = {
    "trl": (),
    "verl": (
        (r"actor_rollout_ref\.rollout\.val_kwargs\.", "generator.eval_sampling."),
        (r"actor_rollout_ref\.rollout\.(temperature|top_p|top_k|min_p)$", r"generator.sampling.\1"),
        (r"actor_rollout_ref\.rollout\.(gpu_memory_utilization|max_num_seqs|enforce_eager)$", r"generator.vllm.\1"),
        (r"actor_rollout_ref\.actor\.optim\.", "trainer.policy.optimizer."),
        (r"actor_rollout_ref\.actor\.(kl_loss_coef)$", r"trainer.algorithm.\1"),
        (r"actor_rollout_ref\.model\.", "model."),
        (r"critic\.optim\.", "critic.optimizer."),
        (r"data\.train_batch_size$", "trainer.train_batch_size"),
        (r"algorithm\.", "trainer.algorithm."),
    ),
    "skyrl": (
        (r"trainer\.placement\.", "placement."),
        (r"trainer\.policy\.model\.", "model."),
        (r"trainer\.ref\.model\.", "reference.model."),
        (r"trainer\.critic\.", "critic."),
        (r"(trainer\.policy|critic)\.optimizer_config\.", r"\1.optimizer."),
        (r"generator\.sampling_params\.", "generator.sampling."),
        (r"generator\.eval_sampling_params\.", "generator.eval_sampling."),
        (
            r"generator\.(?:inference_engine\.)?(gpu_memory_utilization|max_num_seqs|enforce_eager)$",
            r"generator.vllm.\1",
        ),
        (r"generator\.num_inference_engines$|generator\.inference_engine\.num_engines$", "generator.vllm.num_engines"),
        (r"generator\.inference_engine[_.]tensor_parallel_size$", "generator.vllm.tensor_parallel_size"),
        (r"generator\.inference_engine\.", "generator."),
        (r"trainer\.(seed|run_name)$", r"\1"),
        (r"trainer\.(gradient_checkpointing)$", r"model.\1"),
        (r"trainer\.(max_prompt_length)$", r"data.\1"),
        (r"trainer\.policy\.(sequence_parallel_size)$", r"strategy.\1"),
    ),
}
"""How names of a trainer begin, and how the same ones do here; the first that matches counts."""
_SAME = {
    "trl": {
        **{name: f"generator.sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop")},
        **{name: f"trainer.policy.optimizer.{name}" for name in ("weight_decay", "max_grad_norm", "warmup_steps")},
        **{name: name for name in ("seed", "run_name", "output_dir")},
        "gradient_checkpointing": "model.gradient_checkpointing",
        "trust_remote_code": "model.trust_remote_code",
        "max_prompt_length": "data.max_prompt_length",
    }
}
"""Names of TRL, which has no sections, that stand for a setting of the same last name."""
_UNUSED = {
    "verl": re.compile(r"(global_profiler|ray_kwargs|.*\.profiler|reward_model|.*\.checkpoint|.*\.trace)\."),
    "skyrl": re.compile(r"(?!)"),
    "trl": re.compile(r"logging_|disable_tqdm|log_level|include_|hub_|push_to_hub"),
}
"""Names that concern profilers, logs and what is off unless another name turns it on."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "trl": {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 256,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "num_train_epochs": 3,
        "bf16": True,
        "seed": 42,
    },
    "verl": {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
        "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.rollout.n": 1,
        "algorithm.adv_estimator": "gae",
        "trainer.total_epochs": 30,
    },
    "skyrl": {
        "trainer.train_batch_size": 1024,
        "trainer.policy_mini_batch_size": 256,
        "trainer.max_prompt_length": 512,
        "trainer.seed": 42,
        "trainer.policy.optimizer_config.lr": 1e-6,
        "trainer.algorithm.use_kl_loss": True,
        "trainer.algorithm.kl_loss_coef": 0.001,
        "generator.n_samples_per_prompt": 5,
        "generator.max_turns": 1,
        "generator.sampling_params.max_generate_length": 1024,
    },
}
"""What a trainer does where a file says nothing, of what is otherwise here: TRL 1.16, verl 0.9, SkyRL 0.3."""
_NO_LITERAL = {"a", "its", "the", "half", "values", "others", "each"}
_VALUES = re.compile(r"\b[Ff]or ([\w-]+(?: or [\w-]+)*?)(?: write)? ([\w\[\]]+)(?=[,;. ]|$)")
"""In a sentence on values: `For true write token_budget, for false fixed`."""
_NEEDS_A_PERSON = ("divide", "multiply", "opposite", "share", "first value", "{_target_", "number of training batches")


@dataclass
class Migration:
    """What became of a configuration of another trainer."""

    settings: dict[str, Any] = field(default_factory=dict)
    """By our dotted name, or by the name of a group."""
    by_hand: dict[str, str] = field(default_factory=dict)
    """By their name, what a person has to decide or to write."""
    no_equal: dict[str, Any] = field(default_factory=dict)
    """Their names and values for which there is nothing here."""
    not_needed: dict[str, str] = field(default_factory=dict)
    """By their name, why nothing is to be set."""
    unknown: dict[str, str] = field(default_factory=dict)
    """By their name, what their program would compute."""
    assumed: list[str] = field(default_factory=list)
    """Our names that stand for a default of theirs."""


class Converter:
    """What is given of another trainer, and what has become of it.

    Args of the constructor:
        given: Names and values of theirs.
        trainer: `trl`, `verl` or `skyrl`.
        schema: Config for reinforcement learning, SFTConfig for supervised training.
        gpus: Processes that theirs runs in where the file does not say; 0 is not stated.
    """

    def __init__(self, given: Given, trainer: str, schema: type[RunConfig], gpus: int) -> None:
        self._trainer, self.schema, self.gpus = trainer, schema, gpus
        self._known = {each.path: each for each in walk(schema)}
        self.values = dict(given.values)
        self._defaults: set[str] = set()
        if schema is Config:
            there = {*given.values, *given.unknown}
            for name, value in _DEFAULTS[trainer].items():
                if name not in there:
                    self.values[name] = value
                    self._defaults.add(name)
        self.found = Migration(unknown=dict(given.unknown))
        self._rows = {
            name: row for row in peer_rows() for name in (*row.names.get(trainer, ()), *row.names.get("any", ()))
        }
        self.done: set[str] = set()
        self.optimizer = "trainer.policy.optimizer" if schema is Config else "trainer.optimizer"

    def rest(self) -> None:
        """Convert each name that nothing else has taken, by the table or as one of the same name here."""
        for name, value in self.values.items():
            if name in self.done:
                continue
            if _UNUSED[self._trainer].match(name):
                self.found.not_needed[name] = "what it says of logs, profiles or checkpoints is as it is here"
            else:
                self._convert(name, value)
        project = "tracker.wandb.project"
        if project in self.found.settings and "wandb" not in self.found.settings.get("tracker", ()):
            self.found.not_needed["project_name"] = (
                f"{self.found.settings.pop(project)}: for tracker=wandb, which is off"
            )

    def _convert(self, name: str, value: Any) -> None:
        here, written = self.row(name), self._written(name)
        if here is None and written in self._known and not self._known[written].section:
            self.set(written, value, name)
        elif here is None:
            self._open(name, value) or self.found.no_equal.update({name: value})
        elif not here.settings:
            self.found.not_needed[name] = here.convert
        else:
            self._by_row(name, value, here)

    def _open(self, name: str, value: Any) -> bool:
        """Whether the name lies in a mapping of a setting that takes any key: arguments of a template, of vLLM."""
        for end in range(name.count("."), 0, -1):
            above, key = ".".join(name.split(".")[:end]), name.split(".", end)[end]
            here = self.row(above)
            target = here.settings[0] if here is not None and here.settings else self._written(above)
            if target in self._known and self._known[target].open and "." not in key:
                self.found.settings.setdefault(target, {})[key] = value
                return True
        return False

    def row(self, name: str) -> Here | None:
        """What the table says of a name of this trainer."""
        parts = name.split(".")
        return self._rows.get(".".join(parts[-2:])) or self._rows.get(parts[-1])

    def _written(self, name: str) -> str:
        """The name with the sections that it would have here."""
        for before, now in _BEFORE[self._trainer]:
            written, count = re.subn(f"^{before}", now, name)
            if count:
                return written
        written = _SAME.get(self._trainer, {}).get(name, name)
        return written if self.schema is Config else written.replace("trainer.policy.optimizer", self.optimizer)

    def _by_row(self, name: str, value: Any, here: Here) -> None:
        parts = {*self._written(name).split(".")}
        known = [each for each in here.settings if each in self._known]
        if not known:
            if self.schema is Config or any("=" in each for each in here.settings):
                self.found.by_hand[name] = f"{text_of(value)}: {here.settings[0]}. {here.convert}".rstrip(". ")
            else:
                self.found.no_equal[name] = value
            return
        setting = max(known, key=lambda each: len(parts & {*each.split(".")}))
        told = dict(_told_values(here.convert))
        shown = text_of(value)
        if shown in told:
            if told[shown] == "nothing":
                self.found.not_needed[name] = here.convert
            elif told[shown] in _NO_LITERAL:
                self.found.by_hand[name] = f"{shown}: {setting}. {here.convert}"
            else:
                self.set(setting, yaml.safe_load(told[shown]), name)
        elif any(each in here.convert for each in _NEEDS_A_PERSON):
            self.found.by_hand[name] = f"{shown}: {setting}. {here.convert}"
        else:
            self.set(setting, value, name, remedy=here.convert)

    def set(self, setting: str, value: Any, name: str, *, remedy: str = "") -> None:
        """Take a value that the schema accepts; what it refuses, and a second, other value, is for a person."""
        self.done.add(name)
        if name in self.found.unknown:
            return
        if (refused := self._refused(setting, value)) is not None:
            self.found.by_hand[name] = f"{text_of(value)}: {setting} {refused}. {remedy}".rstrip(". ")
        elif setting in self.found.settings and self.found.settings[setting] != value:
            if name not in self._defaults:
                kept = text_of(self.found.settings[setting])
                self.found.by_hand[name] = f"{text_of(value)}: {setting} is {kept} already, by another name"
        else:
            self.found.settings[setting] = value
            if name in self._defaults:
                self.found.assumed.append(setting)

    def _refused(self, setting: str, value: Any) -> str | None:
        tree: Any = value
        for part in reversed(setting.split(".")):
            tree = {part: tree}
        found = [each for each in read_root(tree, self.schema).violations if each.field.startswith(setting)]
        return f"{found[0].rule}" if found else None

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a name, which is done with that."""
        self.done.add(name)
        return self.values.get(name, default)

    def person(self, name: str, said: str) -> None:
        """Leave a name to whoever reads the report, which says already of one that a program computes that it is unknown."""
        if name not in self.found.unknown:
            self.found.by_hand[name] = said


def _told_values(sentence: str) -> Iterator[tuple[str, str]]:
    """Yield which value becomes which, of a sentence such as `For -1 or null write 0, which evaluates before and after`."""
    for theirs, ours in _VALUES.findall(sentence):
        for each in theirs.split(" or "):
            yield each, ours


def text_of(value: Any) -> str:
    """A value as YAML writes it on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()


def gpus_and_nodes(to: Converter, gpus: Any, nodes: Any) -> None:
    """Plan for the devices that they state, or that `--gpus` does."""
    count = (gpus if isinstance(gpus, int) else 0) * (nodes if isinstance(nodes, int) else 1) or to.gpus
    if count:
        to.found.settings["platform"] = "gpu"
        to.found.settings["placement.num_gpus"] = count
        if isinstance(nodes, int) and nodes > 1:
            to.found.settings["placement.num_nodes"] = nodes
            to.found.settings["placement.ray_address"] = "auto"  # of the node where it is started


def context(to: Converter, prompt: Any, response: Any, name: str) -> None:
    """A prompt and a response fill the context."""
    if isinstance(prompt, int) and isinstance(response, int):
        to.set("generator.max_context_length", prompt + response, name)


def trackers(to: Converter, name: str, value: Any) -> None:
    """`tracker=[console,wandb]` of what others call report_to or logger."""
    asked = [value] if isinstance(value, str) else [*(value or ())]
    names = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow"}
    names |= {"trackio": "trackio", "none": "console", "no": "console"}
    for each in asked:
        if each not in names:
            to.person(name, f"{each}: tracker={'|'.join(sorted({*names.values()}))}")
    chosen = dict.fromkeys(["console", *(names[each] for each in asked if each in names)])
    if len(chosen) > 1:
        to.found.settings["tracker"] = [*chosen]


def loss(to: Converter, part: str, name: str, **arguments: Any) -> None:
    """Choose the policy's loss, with those of its arguments that are stated."""
    stated = {key: value for key, value in arguments.items() if value is not None}
    to.set("trainer.algorithm.policy_loss", {TARGET: part, **stated} if stated else part, name)


def schedule(to: Converter, name: str) -> None:
    """Which schedule of the learning rate it is."""
    kinds = {"constant_with_warmup": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
    given = to.take(name)
    if given in kinds:
        to.set(f"{to.optimizer}.schedule", kinds[given], name)
    elif given is not None:
        to.person(name, f"{given}: trainer.policy.optimizer.schedule is constant, linear, cosine or my_code:NAME")


def estimator(to: Converter, given: Any, known: Mapping[str, str], name: str, discount: Any) -> None:
    """Choose the advantage, with a critic where that needs one."""
    setting = "trainer.algorithm.advantage_estimator"
    if given == "gae":
        to.set(setting, {TARGET: "gae", "gae_lambda": 1.0 if discount is None else discount}, name)
        to.found.settings.setdefault("critic.model.path", "policy")
    elif given in known:
        to.set(setting, known[given], name)
    else:
        to.person(name, f"{given}: {setting}; docs/algorithms.md lists them")


def losses(to: Converter, chosen: Any, name: str, section: str) -> None:
    """Choose a loss with those arguments of the table that belong to it; arguments of others are not read there either."""
    arguments: dict[str, Any] = {}
    template = re.compile(r"trainer\.algorithm\.policy_loss=\{_target_:(\w+),(\w+):VALUE\}")
    for each in [name for name in to.values if name.startswith(f"{section}.")]:
        row = to.row(each)
        if row is not None and row.settings and (found := template.fullmatch(row.settings[0])):
            value = to.take(each)
            if found[1] == chosen:
                arguments[found[2]] = value
    loss(to, str(chosen), name, **arguments)


def kl(to: Converter, in_loss: str, weight: str, in_reward: str, reward_weight: str) -> None:
    """Weights of the KL in the loss and in the reward, which others switch on and off beside them."""
    coefficient, uses = to.take(weight, 0.001), to.take(in_loss, False)
    to.set("trainer.algorithm.kl_loss_coef", float(coefficient) if uses else 0.0, in_loss)
    if to.take(in_reward, False):
        first = to.take(reward_weight, coefficient) if reward_weight else coefficient
        to.set("trainer.algorithm.kl_reward_coef", float(first), in_reward)
    to.done |= {name for name in to.values if ".kl_ctrl." in name and not to.values.get(in_reward)}


def reduction(to: Converter, name: str, value: Any) -> None:
    """How token losses become one number, by verl's names or ours."""
    names = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
    names |= {"seq-mean-token-sum-norm": "seq_mean_token_sum_norm"}
    to.set("trainer.algorithm.loss_reduction", names.get(str(value), value), name)
