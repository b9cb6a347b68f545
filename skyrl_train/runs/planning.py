"""`python -m skyrl_train.plan +experiment=gsm8k_multiturn`: what a run would do, without a model and without Ray.

Prints every batch size, the padding to be expected, learning rates, what is kept and moved, and every violation at once.
`plan.lengths=FILE` takes the lengths of recorded rollouts; `--format json` is for scripts. Exit status 2 where something
is violated. `plan.device_memory_gb=80` adds what each pass holds on such a device, by kind, and the largest micro-batch
that fits: predicted, without one; the first plan of a model traces its step, which takes seconds. So does the first plan
on a CPU, which measures what it computes in a second, for the time of a step; `plan.rates=none` leaves that out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.config import Config, PlanConfig, TrainerConfig
from skyrl_train.config.data import DataConfig, EnvironmentConfig
from skyrl_train.config.door import for_hydra
from skyrl_train.config.models import ModelConfig
from skyrl_train.config.rules import MixedDataset, mixed_datasets
from skyrl_train.data import find_sources
from skyrl_train.data.sources import is_cached
from skyrl_train.errors import ConfigError, DataError, ModelError, SkyrlTrainError, Violation, counted
from skyrl_train.model.files import check_special_tokens_of, stated_vocabulary_size
from skyrl_train.model.sizes import local_folder, model_sizes
from skyrl_train.plan import (
    NO_TIME,
    RowLengths,
    head_violations,
    machine_rates,
    make_plan_report,
    placement_report,
    plan_memory,
    rates_of,
    recorded_lengths,
    render_text,
    to_json,
)
from skyrl_train.rollout import ChatTokens, check_tools, checked_prompts
from skyrl_train.rollout.tools import make_parser, tool_schemas
from skyrl_train.runs.cli.command_line import preflight
from skyrl_train.runs.cli.machine import task_violations
from skyrl_train.runs.resolving import resolve
from skyrl_train.system import find_modules_here
from skyrl_train.telemetry.records import read_rollouts

CONFIG_NAME = "config"
_UNCOUNTED = "The training prompts were not counted, for a reason below; planning with one batch of them."


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-plan`; returns the exit status."""
    if argv is None:
        find_modules_here()
    parser = argparse.ArgumentParser(prog="skyrl-plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with custom config groups")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for skyrl_train.main")
    args = parser.parse_args(argv)
    folder = ["--config-dir", args.config_dir] if args.config_dir else []
    overrides = for_hydra(args.overrides)
    config = preflight([*overrides, *folder], config_name=CONFIG_NAME, rules=False)
    assert isinstance(config, Config), "values were checked, too"
    try:
        datasets, refused = mixed_datasets(config.data, config.environment, config.generator.sampling)
        num_train_prompts, note = count_train_prompts(
            config.data,
            config.plan,
            assumed=config.trainer,
            environment=config.environment,
            mix=() if refused else datasets,
        )
        notes = [" ".join(line.split()) for line in config.derived if line.startswith("sizes")]
        notes += [note] if note else []
        progress = Progress()
        asked_for_memory = config.plan.device_memory_gb > 0
        resolved = resolve(config, purpose="plan", announce=progress.tell)
        config, violations, placement, memory = resolved.config, list(resolved.violations), None, None
        notes += resolved.notes
        if resolved.is_placed:
            notes += [" ".join(line.split()) for line in config.derived if line.startswith(("form", "memory"))]
            placement = placement_report(config, resolved.devices)
            try:
                memory = plan_memory(config, announce=progress.tell)
            except ModelError as error:
                if asked_for_memory:
                    raise
                notes.append(f"Memory is left out. {error}")
            finally:
                progress.end()
            violations += [*head_violations(config), *(memory.violations() if memory else ())]
        violations += task_violations(config.environment)
        notes += check_vocabulary(config.model)
        evaluated = [(each.data, each.environment) for each in datasets] or [(config.data, config.environment)]
        for data, environment in evaluated:
            found_here = template_violations(config.model, data, environment)
            violations += [each for each in found_here if each not in violations]
        report = make_plan_report(
            config,
            num_train_prompts=num_train_prompts,
            lengths=_lengths(_rollouts_of(config.plan), step_wise=config.generator.is_step_wise),
            num_parameters=_num_parameters(config.model, config.plan, is_known=memory is not None),
            violations=violations,
            memory=memory,
            placement=placement,
            rates=rates_of(config.plan),
            machine=None
            if config.plan.rates == NO_TIME
            else lambda platform, dtype: machine_rates(platform, dtype, announce=progress.tell),
            num_eval_prompts=sum(_count_eval_prompts(each, environment) for each, environment in evaluated),
            announce=progress.tell,
        )
        progress.end()
    except SkyrlTrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    text = "\n".join([*(f"note: {each}" for each in notes), render_text(report)])
    sys.stdout.write((to_json(report) if args.format == "json" else text).rstrip("\n") + "\n")
    return 2 if report.violations else 0


class Progress:
    """Says on stderr what takes seconds: at a terminal on one line that is written anew, else on a line each."""

    def __init__(self) -> None:
        self._rewrites, self._width = sys.stderr.isatty(), 0

    def tell(self, text: str) -> None:
        """Say what is done now."""
        shown = f"note: {text}"
        sys.stderr.write(f"\r{shown:<{self._width}}" if self._rewrites else f"{shown}\n")
        sys.stderr.flush()
        self._width = len(shown)

    def end(self) -> None:
        """Leave the terminal's line empty."""
        if self._rewrites and self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
        self._width = 0


def count_train_prompts(
    data: DataConfig,
    plan: PlanConfig,
    *,
    assumed: TrainerConfig,
    environment: EnvironmentConfig,
    mix: Sequence[MixedDataset] = (),
) -> tuple[int, str]:
    """Training prompts, and a note where they had to be assumed because the data is not on this machine.

    Raises DataError for rows that the environment cannot use.
    """
    if plan.num_train_prompts:
        return plan.num_train_prompts, ""
    if mix:
        found = [count_train_prompts(each.data, plan, assumed=assumed, environment=each.environment) for each in mix]
        return sum(count for count, _ in found), next((note for _, note in found if note), "")
    try:
        for source in find_sources(data.train, data.reader):
            if source.on_hub and not is_cached(
                "/".join(source.location.partition(":")[0].split("/")[:2]), dataset=True
            ):
                raise DataError(f"{source.location} is fetched from the hub when the run begins.")
    except DataError as error:
        count = assumed.train_batch_size * max(assumed.total_steps, 1)
        return (
            count,
            f"{error} Planning with {counted(count, 'prompt')}; plan.num_train_prompts=N states how many there are.",
        )
    except ConfigError:  # of the part that reads rows, which is told with all else that is wrong
        return assumed.train_batch_size, _UNCOUNTED
    try:
        return len(checked_prompts(data, data.train, data.max_train_prompts, environment)), ""
    except ConfigError:  # likewise, or of the environment
        return assumed.train_batch_size, _UNCOUNTED


def _count_eval_prompts(data: DataConfig, environment: EnvironmentConfig) -> int:
    """Held-out prompts; 0 where they are not on this machine, or cannot be read, which a run tells."""
    held_out = data.held_out
    try:
        if not held_out or any(source.on_hub for source in find_sources(held_out, data.reader)):
            return 0
        return len(checked_prompts(data, held_out, data.max_validation_prompts, environment))
    except (ConfigError, DataError):
        return 0


def check_vocabulary(model: ModelConfig) -> list[str]:
    """Check the special tokens of a model as a run does, by its files. Return a note where they are not on this machine.

    Raises ModelError for a token that the model has no embedding of.
    """
    folder = local_folder(model.path, revision=model.revision)
    rows = 0 if folder is None else stated_vocabulary_size(folder)
    if folder is None or not rows:
        return [f"The special tokens of {model.path} were not checked: its files are not on this machine."]
    beside = local_folder(model.tokenizer_path) if model.tokenizer_path else folder
    check_special_tokens_of(folder, model, rows=rows, tokenizer_folder=beside)
    return []


def template_violations(model: ModelConfig, data: DataConfig, environment: EnvironmentConfig) -> list[Violation]:
    """Return why the model could not see or call `environment.tools`, where there are some and its tokenizer is on this
    machine. Raises DataError for a chat template that is of no use, ModelError for a tokenizer."""
    path = model.tokenizer_path or model.path
    if not environment.tools or local_folder(path, revision=model.revision) is None:
        return []
    from skyrl_train.model import load_tokenizer

    tokenizer = load_tokenizer(model)
    chat = ChatTokens(tokenizer, prompt_format=data.prompt_format, template_kwargs=data.template_kwargs)
    # A format that is named is looked up by its own rule, and one of vLLM's on the machine of the run.
    reads_calls = environment.tool_format != "auto" or make_parser("auto", tokenizer) is not None
    try:
        tools = tool_schemas(environment.tools)
        check_tools((), tools, chat, reads_calls=reads_calls, environment=environment.env_class)
    except ConfigError as error:
        return list(error.violations)
    return []


def count_parameters(path: str) -> int | None:
    """Return the number of parameters in a model folder, read from the headers of its safetensors files; None where
    there are none on this machine."""
    folder = local_folder(path)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    return sum(_parameters_in(file) for file in files) or None


def _num_parameters(model: ModelConfig, plan: PlanConfig, *, is_known: bool) -> int | None:
    """Return the parameters of the policy's model: of its files, or where its memory was predicted, of its sizes."""
    counted = count_parameters(model.path)
    if counted is None and is_known:
        return model_sizes(plan.architecture or model.path, revision=model.revision).parameters
    return counted


def _parameters_in(file: Path) -> int:
    """A safetensors file begins with the length of its JSON header, as 8 bytes little-endian."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _rollouts_of(plan: PlanConfig) -> str:
    """Where the lengths are recorded: what is stated, or the rollouts of the run whose rates are taken."""
    recorded = Path(plan.rates) / "rollouts"
    return plan.lengths or (
        str(recorded) if plan.rates not in ("", NO_TIME) and any(recorded.glob("train_step_*")) else ""
    )


def _lengths(recorded: str, *, step_wise: bool) -> RowLengths | None:
    """Return the row lengths of `recorded` rollouts, a file or a folder; None where none are named. Raises DataError."""
    if not recorded:
        return None
    path = Path(recorded)
    files = [path]
    if path.is_dir() and path.suffix != ".parquet":
        files = sorted(file for file in path.glob("train_step_*") if file.suffix in (".parquet", ".jsonl"))
    batches = [batch for file in files for batch in read_rollouts(file).values()]
    try:
        return recorded_lengths(batches, step_wise=step_wise, source=str(path))
    except ValueError as error:
        raise DataError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
