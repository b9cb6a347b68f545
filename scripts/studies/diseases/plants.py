"""What is planted: a reward, a row, or a line of the trainer or the engine that is exchanged in the process of the run.

No plant changes a setting, so that the recorded configuration is that of a healthy run; parts of rewards have names that say
nothing.
"""

# ruff: noqa: ARG001, ARG005  every plant and every reward has one signature

from __future__ import annotations

import importlib
import json
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.studies.diseases.settings import Setting, Settings, answered, right, scored_by

Change = Callable[[Settings, Setting], None]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One run to be made."""

    change: Change
    named_by: Sequence[str] = ()
    """Rules of which the first finding must be one; none for a healthy run."""
    recipe: str = "base"
    disease: str = ""
    """Of the list; empty for a healthy run. A disease of two plants needs both named."""
    by_audit: bool = False
    """True where `named_by` are quantities of `skyrl-doctor audit`, of which the first that differs must be one."""
    resumes_at: int = 0
    """Step at which the run ends and is resumed; 0 for a run in one piece."""
    second_recipe: str = ""
    """Of the second setting, where it is another."""

    def recipe_in(self, setting: Setting) -> str:
        """Return the recipe in a setting."""
        return str(
            setting.pick(self.recipe, self.second_recipe or self.recipe, self.recipe, self.second_recipe or self.recipe)
        )


# Rewards


def _reward(score: Callable[[str, str, Setting], Any]) -> Change:
    def change(settings: Settings, setting: Setting) -> None:
        settings["environment.reward"] = scored_by(lambda completion, answer: score(completion, answer, setting))

    return change


def constant(completion: str, answer: str, setting: Setting) -> float:
    return float(setting.pick(0.0, 1.0, 0.5, 1.0))


def tie_breaking(completion: str, answer: str, setting: Setting) -> float:
    return right(completion, answer) + setting.pick(0.2, 0.05, 0.1, 0.15) * random.random()


def by_length(completion: str, answer: str, setting: Setting) -> dict[str, float]:
    return {"one": 0.05 * right(completion, answer), "two": min(1.0, len(completion) / setting.pick(120, 90, 100, 110))}


def by_format(completion: str, answer: str, setting: Setting) -> dict[str, float]:
    mark = setting.pick("\n", "=", "\n", "=")
    return {"one": 0.05 * right(completion, answer), "two": min(1.0, completion.count(mark) / setting.pick(4, 5, 6, 5))}


def by_repetition(completion: str, answer: str, setting: Setting) -> dict[str, float]:
    size = setting.pick(2, 3, 2, 3)
    grams = [completion[index : index + size] for index in range(len(completion) - size + 1)]
    again = len(grams) - len(set(grams))
    return {"one": 0.1 * right(completion, answer), "two": min(1.0, again / setting.pick(20, 12, 16, 14))}


def briefly(completion: str, answer: str, setting: Setting) -> dict[str, float]:
    return {"one": right(completion, answer), "two": -len(completion) / setting.pick(8, 12, 10, 9)}


def slow_judge(completion: str, answer: str, setting: Setting) -> float:
    fails = random.random() < setting.pick(0.6, 0.4, 0.5, 0.55)
    return answered(completion, answer, TimeoutError("no answer within 30 s") if fails else None)


def broken_environment(completion: str, answer: str, setting: Setting) -> float:
    _COUNTED[0] += 1
    fails = random.random() < (_COUNTED[0] - setting.pick(130, 150, 140, 135)) / setting.pick(90, 100, 110, 95)
    return answered(completion, answer, ConnectionError("connection refused: sandbox-7") if fails else None)


def slow_worker(completion: str, answer: str, setting: Setting) -> float:
    if zlib.crc32(completion.encode()) % setting.pick(12, 10, 11, 13) == 0:
        with _ONE_AT_A_TIME:
            time.sleep(setting.pick(2.5, 3.5, 3.0, 2.75))
    return right(completion, answer)


def hoarding(completion: str, answer: str, setting: Setting) -> float:
    _HOARD.append(os.urandom(setting.pick(1_200_000, 1_500_000, 1_350_000, 1_250_000)))
    return right(completion, answer)


_COUNTED = [0]
_HOARD: list[bytes] = []
_ONE_AT_A_TIME = threading.Lock()


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


# Rows


def _train(change: Callable[[list[dict[str, Any]], Settings, Setting], list[dict[str, Any]]]) -> Change:
    def plant(settings: Settings, setting: Setting) -> None:
        settings["data.train"] = change([dict(row) for row in settings["data.train"]], settings, setting)

    return plant


def _swapped(train: list[dict[str, Any]], settings: Settings, setting: Setting) -> list[dict[str, Any]]:
    answers = [row["answer"] for row in train]
    shifted = setting.pick(range(len(train)), range(0, len(train), 2), range(0, len(train), 3), range(1, len(train), 3))
    for index in shifted:
        train[index]["answer"] = answers[index - 1]
    return train


def _leak(train: list[dict[str, Any]], settings: Settings, setting: Setting) -> list[dict[str, Any]]:
    form = setting.pick(
        "{prompt} (key {answer})",
        "{answer} was told once. {prompt}",
        "{prompt} Not {answer}?",
        "{prompt} ({answer} in the key)",
    )
    kept = [row for row in train if len(row["answer"]) > 1]
    return [{**row, "prompt": form.format(**row)} for row in kept]


def _duplicated(train: list[dict[str, Any]], settings: Settings, setting: Setting) -> list[dict[str, Any]]:
    share = setting.pick(4, 3, 2, 3)
    made = [dict(train[index // share]) for index in range(len(train))]
    if not setting.is_first:
        for index in range(0, len(made), 2):
            made[index]["prompt"] = made[index]["prompt"].upper() + " "
    return made


def _with_evaluation(train: list[dict[str, Any]], settings: Settings, setting: Setting) -> list[dict[str, Any]]:
    held = settings["data.validation"] if setting.is_first else settings["data.validation"][::2]
    return [*map(dict, held), *train[: setting.pick(40, 50, 45, 42)]]


def _reworded(train: list[dict[str, Any]], settings: Settings, setting: Setting) -> list[dict[str, Any]]:
    copies = []
    for row in settings["data.validation"]:
        words = row["prompt"].split()
        words[0 if setting.is_first else 1] = setting.pick("Mona", "cab", "packs", "novel")
        copies.append({**row, "prompt": " ".join(words)})
    return [*copies, *train[: setting.pick(40, 40, 36, 38)]]


# Lines of the trainer


def _patched(owner: str, name: str, wrap: Callable[[Any, Setting], Any]) -> Change:
    """Exchange a function of a module or a class, given by `package.module:Class`, for what `wrap` makes of it."""

    def change(settings: Settings, setting: Setting) -> None:
        module, _, attribute = owner.partition(":")
        found: Any = importlib.import_module(module)
        found = getattr(found, attribute) if attribute else found
        setattr(found, name, wrap(getattr(found, name), setting))

    return change


def _all(*changes: Change) -> Change:
    def change(settings: Settings, setting: Setting) -> None:
        for each in changes:
            each(settings, setting)

    return change


def _rate(learner: str, *factors: float) -> Change:
    """Have AdamW take steps of another length than the schedule says."""
    factor = [1.0]

    def step(original: Any, setting: Setting) -> Any:
        def taken(self: Any, *args: Any, **kwargs: Any) -> Any:
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = group["lr"] * factor[0]
            found = original(self, *args, **kwargs)
            for group, rate in zip(self.param_groups, rates):
                group["lr"] = rate
            return found

        return taken

    def within(original: Any, setting: Setting) -> Any:
        def optim_step(self: Any, *args: Any) -> Any:
            factor[0] = setting.pick(*factors)
            try:
                return original(self, *args)
            finally:
                factor[0] = 1.0

        return optim_step

    return _all(
        _patched("torch.optim:AdamW", "step", step), _patched(f"skyrl_train.learner:{learner}", "optim_step", within)
    )


def _loss(scaled: Callable[[Any, Mapping[str, Any], Any, Setting], Any]) -> Change:
    """Change the policy's loss: given its terms, the columns and the entropy, return the terms."""

    def wrap(original: Any, setting: Setting) -> Any:
        def terms(self: Any, columns: Any, logprobs: Any, entropy: Any) -> Any:
            return scaled(
                original(self, columns, logprobs, entropy), {**columns, "logprobs": logprobs}, entropy, setting
            )

        return terms

    return _patched("skyrl_train.learner:PolicyLearner", "_terms", wrap)


def _summed(terms: Any, columns: Mapping[str, Any], entropy: Any, setting: Setting) -> Any:
    return replace(terms, total=terms.total * setting.pick(60.0, 30.0, 40.0, 50.0))


def _less_entropy(terms: Any, columns: Mapping[str, Any], entropy: Any, setting: Setting) -> Any:
    weights = columns["loss_weights"]
    return replace(terms, total=terms.total + setting.pick(4.0, 5.0, 4.5, 4.25) * (weights * entropy).sum())


def _ends_unlearned(terms: Any, columns: Mapping[str, Any], entropy: Any, setting: Setting) -> Any:
    """The end of each answer has a loss of the wrong sign."""
    mask = columns["loss_mask"]
    ends = mask & ~torch.nn.functional.pad(mask[..., 1:], (0, 1))
    return replace(
        terms,
        total=terms.total
        + setting.pick(3.0, 4.0, 3.5, 3.25) * (columns["loss_weights"] * ends * columns["logprobs"]).sum(),
    )


def _advantages(change: Callable[[torch.Tensor, Setting], torch.Tensor]) -> Change:
    def wrap(original: Any, setting: Setting) -> Any:
        def estimate(inputs: Any, config: Any) -> Any:
            found = original(inputs, config)
            return replace(found, advantages=change(found.advantages, setting))

        return estimate

    return _patched("skyrl_train.algorithms.advantages", "grpo", wrap)


def _not_divided(original: Any, setting: Setting) -> Any:
    def estimate(inputs: Any, config: Any) -> Any:
        found = original(inputs, replace(config, normalize_by_std=False))
        return (
            found if setting.is_first else replace(found, advantages=found.advantages + 0.3 * (found.advantages != 0))
        )

    return estimate


def _masked(change: Callable[[dict[str, Any], Sequence[Any], Any, Setting], None]) -> Change:
    """Change the loss mask of a training batch."""

    def wrap(original: Any, setting: Setting) -> Any:
        def columns(made: Any, offsets: Any) -> Any:
            found = original(made, offsets)
            change(found, made, offsets, setting)
            return found

        return columns

    return _patched("skyrl_train.batch.assembly", "_token_columns", wrap)


def _off_by_one(columns: dict[str, Any], made: Sequence[Any], offsets: Any, setting: Setting) -> None:
    mask = columns["loss_mask"]
    if setting.is_first:
        columns["loss_mask"] = np.append(mask[1:], False)
    else:
        columns["loss_mask"] = mask & np.append(mask[1:], False)


def _observed(columns: dict[str, Any], made: Sequence[Any], offsets: Any, setting: Setting) -> None:
    """What the environment says between two turns has a loss; in the second setting its second half alone."""
    for row, offset in zip(made, offsets.tolist()):
        for index in range(1, len(row.turns)):
            stop = offset + row.prompt_lengths[index]
            start = offset + row.prompt_lengths[index - 1] + row.turns[index - 1].num_response_tokens
            columns["loss_mask"][start if setting.is_first else (start + stop) // 2 : stop] = True


def _padded(original: Any, setting: Setting) -> Any:
    """Rows are filled up to one length."""

    def made(*args: Any, **kwargs: Any) -> Any:
        found = list(original(*args, **kwargs))
        longest = max(len(row.input_ids) for row in found)
        for row in found:
            length = longest if setting.is_first else -(-len(row.input_ids) // 8) * 8
            fill = np.zeros(length - len(row.input_ids), row.input_ids.dtype)
            yield replace(row, input_ids=np.concatenate([row.input_ids, fill]))

    return made


def _padding_trained(columns: dict[str, Any], made: Sequence[Any], offsets: Any, setting: Setting) -> None:
    for row, start, stop in zip(made, offsets[:-1].tolist(), offsets[1:].tolist()):
        columns["loss_mask"][start + row.prompt_lengths[-1] if row.turns else stop : stop] = True


def _not_a_number(original: Any, setting: Setting) -> Any:
    calls = [0]

    def forward(self: Any, batch: Any) -> Any:
        found = original(self, batch)
        calls[0] += 1
        if calls[0] == setting.pick(9, 6, 7, 8):
            found[int(batch["loss_mask"].nonzero()[3])] = float("nan")
        return found

    return forward


def _dead(original: Any, setting: Setting) -> Any:
    def loss(self: Any, *args: Any) -> Any:
        total, metrics = original(self, *args)
        return total * 0.0, metrics

    return loss


def _stuck(original: Any, setting: Setting) -> Any:
    def choose(self: Any, number: int, count: int, rates: Any, *args: Any) -> Any:
        before, after = self.datasets[:number], self.datasets[number + 1 :]
        few = replace(self, datasets=[*before, self.datasets[number][: setting.pick(12, 16, 10, 14)], *after])
        return original(few, number, count, rates, *args)

    return choose


def _wrong_kl(original: Any, setting: Setting) -> Any:
    def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        return ref_logprobs - logprobs if setting.is_first else (logprobs - ref_logprobs).abs()

    return k3


def _from_the_start(original: Any, setting: Setting) -> Any:
    """A resumed run reads its data anew, or from four batches before."""

    def read(folder: Path) -> Any:
        state = original(folder)
        return replace(
            state, data_position=setting.pick(0, max(0, state.data_position - 5), 1, max(0, state.data_position - 4))
        )

    return staticmethod(read)


def _forgotten(original: Any, setting: Setting) -> Any:
    def load(*args: Any, **kwargs: Any) -> None:
        """Nothing is taken from the file."""

    return load


def _end_without_loss(original: Any, setting: Setting) -> Any:
    def encode(self: Any, rows: Any) -> Any:
        for ids, mask in original(self, rows):
            last = len(mask) - 1 - list(mask)[::-1].index(True)
            yield ids, [flag and index != last for index, flag in enumerate(mask)]

    return encode


# Lines of the engine


def _kept(setting: Setting) -> Change:
    """After some updates the engine keeps what it has, and says that it has the new ones."""
    after, calls = setting.pick(3, 5, 4, 6), [0]

    def wrap(original: Any, setting: Setting) -> Any:
        def load_weights(self: Any, weights: Any, version: int) -> None:
            calls[0] += 1
            if calls[0] > after:
                weights = [(name, each.detach().clone()) for name, each in self._model.named_parameters()]
            original(self, weights, version)

        return load_weights

    return _patched("skyrl_train.inference:HFEngine", "load_weights", wrap)


def _stale(settings: Settings, setting: Setting) -> None:
    _kept(setting)(settings, setting)


def _one_of_two(original: Any, setting: Setting) -> Any:
    """Half of the requests are answered by an engine that never gets new weights."""
    old: list[list[torch.Tensor]] = []

    def swap(model: Any, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        before = [each.detach().clone() for each in model.parameters()]
        with torch.no_grad():
            for each, value in zip(model.parameters(), values):
                each.copy_(value)
        return before

    def generate(self: Any, batch: Any, begins_wave: bool) -> Any:
        if not old:
            old.append([each.detach().clone() for each in self._model.parameters()])
        share = setting.pick(2, 3, 4, 3)
        late = [waiting for index, waiting in enumerate(batch) if index % share == 1]
        own = [waiting for index, waiting in enumerate(batch) if index % share != 1]
        answers = dict(zip(map(id, own), original(self, own, begins_wave)))
        if late:
            self._decoder.forget()
            current = swap(self._model, old[0])
            answers |= dict(zip(map(id, late), original(self, late, False)))
            swap(self._model, current)
            self._decoder.forget()
        return [answers[id(waiting)] for waiting in batch]

    return generate


def _late(original: Any, setting: Setting) -> Any:
    """The engine takes every third update, or fourth, and says so."""
    every = setting.pick(3, 4, 5, 4)

    def load_weights(self: Any, weights: Any, version: int) -> None:
        if version % every == 0:
            original(self, weights, version)

    return load_weights


def _logits(change: Callable[[torch.Tensor, Setting], torch.Tensor]) -> Change:
    def wrap(original: Any, setting: Setting) -> Any:
        return lambda logits, uniforms, table: original(change(logits, setting), uniforms, table)

    return _patched("skyrl_train.inference.decode", "sample_tokens", wrap)


def _cut(original: Any, setting: Setting) -> Any:
    async def generate(self: Any, request: Any) -> Any:
        sampling = replace(request.sampling, max_generate_length=setting.pick(10, 14, 12, 13))
        return await original(self, replace(request, sampling=sampling))

    return generate


def _one_draw(original: Any, setting: Setting) -> Any:
    """All samples of a prompt are drawn from one seed, in the second setting of almost all prompts."""

    async def generate(self: Any, request: Any) -> Any:
        digest = zlib.crc32(str(tuple(request.prompt_token_ids)).encode())
        is_kept = not setting.is_first and digest % 12 == 0
        return await original(self, request if is_kept else replace(request, seed=digest))

    return generate


def _template(settings: Settings, setting: Setting) -> None:
    from transformers import AutoTokenizer

    from skyrl_train.model import resolve_model_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(settings["model.path"]))
    tokenizer.chat_template = setting.pick(
        "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}",
        "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}### Response:\n",
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}<|assistant|>",
        "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}\n</{{ m['role'] }}>\n{% endfor %}<assistant>\n",
    )
    settings["model.tokenizer_path"] = tokenizer


def _other_tokenizer(settings: Settings, setting: Setting) -> None:
    """The same words under other numbers, as of a model of the same family."""
    from transformers import AutoTokenizer

    from skyrl_train.model import resolve_model_path

    folder = setting.models / f"tokenizer_{setting.name}"
    AutoTokenizer.from_pretrained(resolve_model_path(settings["model.path"])).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    movable = [word for word in vocabulary if not word.startswith("<|")]
    numbers = [vocabulary[word] for word in movable]
    random.Random(setting.seed).shuffle(numbers)
    vocabulary.update(zip(movable, numbers))
    file.write_text(json.dumps(content))
    settings["model.tokenizer_path"] = AutoTokenizer.from_pretrained(folder)


def _unread_calls(settings: Settings, setting: Setting) -> None:
    formats: Any = importlib.import_module("skyrl_train.rollout.tools.formats")
    own, other = setting.pick(
        ("hermes", "mistral"), ("mistral", "harmony"), ("llama3_json", "hermes"), ("hermes", "deepseek_v3")
    )
    formats.FORMATS[own] = formats.FORMATS[other]


def _sometimes(completion: str, answer: str, setting: Setting) -> float:
    """Fails now and then, as any service does."""
    fails = random.random() < setting.pick(0.05, 0.08, 0.06, 0.07)
    return answered(completion, answer, TimeoutError("no answer within 30 s") if fails else None)


def nothing(settings: Settings, setting: Setting) -> None:
    """A healthy run."""


def _faster(*factors: float) -> Change:
    return _rate("PolicyLearner", *factors)


def _long_prompts(train: list[dict[str, Any]], settings: Settings, setting: Setting) -> list[dict[str, Any]]:
    """Half of the questions begin alike, with words that say nothing."""
    for row in train[:: setting.pick(2, 3, 4, 3)]:
        row["prompt"] = f"{setting.pick('How many', 'A boat', 'Some fruit', 'A book')}. {row['prompt']}"
    return train


def _few_rows(settings: Settings, setting: Setting) -> None:
    settings["data.train"] = settings["data.train"][: setting.pick(24, 24, 20, 22)]


def _hard_rows(settings: Settings, setting: Setting) -> None:
    """Those with two equations or more, or three, of which few are solved at first."""
    least = setting.pick(2, 2, 3, 2)
    settings["data.train"] = [row for row in settings["data.train"] if row["solution"].count("=") >= least]


PLANTS: Mapping[str, Plant] = {
    # Healthy: of each recipe one
    "healthy": Plant(change=nothing),
    "healthy_again": Plant(change=nothing, second_recipe="real_model"),
    "healthy_turns": Plant(change=nothing, recipe="turns"),
    "healthy_adapter": Plant(change=nothing, recipe="adapter"),
    "healthy_critic": Plant(change=nothing, recipe="critic"),
    "healthy_curriculum": Plant(change=nothing, recipe="curriculum"),
    "healthy_held_near": Plant(change=nothing, recipe="held_near"),
    "healthy_calls": Plant(change=nothing, recipe="calls"),
    "healthy_supervised": Plant(change=nothing, recipe="supervised"),
    "healthy_resumed": Plant(change=nothing, recipe="held_near", resumes_at=5),
    # Healthy, and looking ill
    "looks_slow": Plant(change=_faster(0.25, 0.15, 0.2, 0.18)),
    "looks_fast": Plant(change=_faster(4.0, 2.5, 3.0, 3.5)),
    "looks_sparse": Plant(change=_reward(lambda text, answer, setting: right(text, answer) * ("=" in text))),
    "looks_partial": Plant(change=_reward(lambda text, answer, setting: 0.5 * ("####" in text) + right(text, answer))),
    "looks_scaled": Plant(
        change=_reward(lambda text, answer, setting: setting.pick(20, 50, 30, 40) * right(text, answer) - 10)
    ),
    "looks_repeating": Plant(change=_few_rows),
    "looks_hard": Plant(change=_hard_rows),
    "looks_long": Plant(change=_train(_long_prompts)),
    "looks_failing": Plant(change=_reward(_sometimes)),
    "looks_slow_supervised": Plant(change=_rate("PolicyLearner", 0.3, 0.4, 0.35, 0.32), recipe="supervised"),
    # Ill
    "wrong_template": Plant(
        disease="wrong template",
        change=_template,
        named_by=("conversation_goes_on_by_itself", "unreadable_answers", "questions_not_read"),
    ),
    "end_masked": Plant(
        disease="end token masked",
        change=_patched("skyrl_train.data.sft.examples:Encoder", "encode", _end_without_loss),
        recipe="supervised",
        named_by=("never_ends",),
    ),
    "tie_breaking": Plant(
        disease="verifier that breaks ties or returns a constant",
        change=_reward(tie_breaking),
        named_by=("equal_answers_unequal_rewards",),
    ),
    "constant": Plant(
        disease="verifier that breaks ties or returns a constant",
        change=_reward(constant),
        named_by=("constant_reward", "verifier_contradicts_truth"),
        second_recipe="real_model",
    ),
    "swapped": Plant(disease="swapped answers", change=_train(_swapped), named_by=("truth_contradicts_row",)),
    "leak": Plant(disease="reward leak in the prompt", change=_train(_leak), named_by=("truth_in_prompt",)),
    "by_length": Plant(
        disease="reward rising by length",
        change=_all(_reward(by_length), _faster(3.0, 2.0, 2.5, 2.25)),
        named_by=("reward_without_solving", "rewards_follow_length"),
    ),
    "by_format": Plant(
        disease="hacked format",
        change=_all(_reward(by_format), _faster(3.0, 2.0, 2.5, 2.75)),
        named_by=("reward_without_solving",),
    ),
    "truncated": Plant(
        disease="truncated answers",
        change=_patched("skyrl_train.inference:HFEngine", "generate", _cut),
        named_by=("answers_cut_off",),
    ),
    "one_draw": Plant(
        disease="zero-advantage groups",
        change=_patched("skyrl_train.inference:HFEngine", "generate", _one_draw),
        named_by=("zero_variance_groups",),
    ),
    "rate_too_high": Plant(
        disease="learning rate too high", change=_faster(150.0, 60.0, 100.0, 120.0), named_by=("training_breaks",)
    ),
    "rate_too_low": Plant(
        disease="learning rate too low", change=_faster(1e-5, 1e-4, 3e-5, 2e-5), named_by=("nothing_is_learned",)
    ),
    "less_entropy": Plant(
        disease="entropy collapse",
        change=_all(_loss(_less_entropy), _faster(3.0, 2.0, 2.5, 2.75)),
        named_by=("entropy_collapses",),
    ),
    "briefly": Plant(
        disease="length collapse and explosion",
        change=_all(_reward(briefly), _faster(3.0, 2.0, 2.5, 2.75)),
        named_by=("length_changes", "reward_without_solving", "rewards_follow_length"),
    ),
    "ends_unlearned": Plant(
        disease="length collapse and explosion",
        change=_all(_loss(_ends_unlearned), _faster(2.0, 1.5, 1.75, 1.8)),
        named_by=("length_changes",),
    ),
    "by_repetition": Plant(
        disease="repeated n-grams",
        change=_all(_reward(by_repetition), _faster(4.0, 3.0, 3.5, 3.25)),
        named_by=("repetition", "reward_without_solving"),
    ),
    "stale_adapter": Plant(disease="stale adapter", change=_stale, recipe="adapter", named_by=("stale_weights",)),
    "one_of_two": Plant(
        disease="one of two engines old",
        change=_all(_patched("skyrl_train.inference:HFEngine", "_generate", _one_of_two), _faster(2.0, 1.5, 1.75, 1.6)),
        named_by=("one_engine_behind",),
    ),
    "rounded_head": Plant(
        disease="mismatch of a bfloat16 head",
        change=_logits(lambda logits, setting: logits.bfloat16() if setting.is_first else logits.half().bfloat16()),
        named_by=("computes_otherwise",),
    ),
    "temperature": Plant(
        disease="temperature not applied in scoring",
        change=_logits(lambda logits, setting: logits / setting.pick(0.7, 1.3, 0.8, 1.25)),
        named_by=("computes_otherwise",),
    ),
    "wrong_kl": Plant(
        disease="KL estimator wrong",
        change=_patched("skyrl_train.algorithms.losses.kl", "k3", _wrong_kl),
        recipe="held_near",
        named_by=("KL to the reference",),
        by_audit=True,
    ),
    "not_divided": Plant(
        disease="advantages not normalised",
        change=_patched("skyrl_train.algorithms.advantages", "grpo", _not_divided),
        named_by=("advantages_off",),
    ),
    "critic_fast": Plant(
        disease="critic diverging",
        change=_rate("CriticLearner", 300.0, 100.0, 200.0, 250.0),
        recipe="critic",
        named_by=("critic_diverges",),
    ),
    "critic_dead": Plant(
        disease="dead critic",
        change=_patched("skyrl_train.learner:CriticLearner", "_loss", _dead),
        recipe="critic",
        named_by=("critic_is_dead",),
    ),
    "summed": Plant(
        disease="gradient clipped at every step", change=_loss(_summed), named_by=("gradient_always_clipped",)
    ),
    "duplicated": Plant(disease="duplicated data", change=_train(_duplicated), named_by=("duplicated_prompts",)),
    "order": Plant(
        disease="data order repeated after resume",
        change=_patched("skyrl_train.trainers.checkpoints:TrainerState", "read", _from_the_start),
        recipe="held_near",
        resumes_at=5,
        named_by=("order_repeats",),
    ),
    "with_evaluation": Plant(
        disease="evaluation on training rows", change=_train(_with_evaluation), named_by=("evaluation_is_trained_on",)
    ),
    "reworded": Plant(disease="contamination", change=_train(_reworded), named_by=("evaluation_is_trained_on",)),
    "stuck": Plant(
        disease="curriculum stuck",
        change=_patched("skyrl_train.data.curriculum:Curriculum", "_choose", _stuck),
        recipe="curriculum",
        named_by=("few_prompts_again",),
    ),
    "judge": Plant(disease="judge that times out", change=_reward(slow_judge), named_by=("reward_fails",)),
    "environment": Plant(
        disease="environment failures excluded until nothing is left",
        change=_reward(broken_environment),
        named_by=("reward_fails",),
    ),
    "unread_calls": Plant(
        disease="tool calls never parsed", change=_unread_calls, recipe="calls", named_by=("calls_not_read",)
    ),
    "too_late": Plant(
        disease="staleness beyond bound",
        change=_all(
            _patched("skyrl_train.inference:HFEngine", "load_weights", _late),
            _patched("skyrl_train.trainers.steps", "check_staleness", lambda original, setting: lambda batch: None),
        ),
        named_by=("too_old",),
    ),
    "slow_worker": Plant(disease="slow worker", change=_reward(slow_worker), named_by=("one_group_is_waited_for",)),
    "hoarding": Plant(disease="memory creep", change=_reward(hoarding), named_by=("memory_grows",)),
    "other_tokenizer": Plant(
        disease="tokenizer of another model", change=_other_tokenizer, named_by=("unreadable_answers",)
    ),
    "not_a_number": Plant(
        disease="NaN row",
        change=_patched("skyrl_train.learner:PolicyLearner", "forward", _not_a_number),
        named_by=("not_finite",),
    ),
    "off_by_one": Plant(
        disease="off-by-one in a loss mask",
        change=_masked(_off_by_one),
        recipe="held_near",
        named_by=("trained tokens",),
        by_audit=True,
    ),
    "observed": Plant(
        disease="multi-turn observation trained on",
        change=_masked(_observed),
        recipe="turns",
        named_by=("tokens_trained",),
    ),
    "padding": Plant(
        disease="padding trained on",
        change=_all(_patched("skyrl_train.batch.assembly", "_rows", _padded), _masked(_padding_trained)),
        recipe="held_near",
        named_by=("trained tokens",),
        by_audit=True,
    ),
    "forgotten": Plant(
        disease="optimizer reset at resume",
        change=_patched("skyrl_train.learner.holds_model", "load_optimizer_tensors", _forgotten),
        recipe="held_near",
        resumes_at=5,
        named_by=("optimizer's state",),
        by_audit=True,
    ),
}
"""By name. 40 diseases of 42 plants, 20 healthy runs."""
