"""One trajectory for a reader: its turns as a chat and as a tree, and what is known of each token."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.data import assets
from skyrl_train.system.files import cache_folder
from skyrl_train.telemetry.reading import Run

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], list[str]]

_BUILTIN = "builtin:"
_LONGEST_CHARACTER = 8
"""Tokens that a character is looked for in."""
_COLUMNS = (
    ("advantage", "Advantage", "diverging", 0, "what the loss weighs the token's log-probability with"),
    ("logprob", "Log-prob (engine)", "sequential", None, "of the token when it was sampled, in nats"),
    ("policy_logprob", "Log-prob (trainer)", "sequential", None, "by the trainer's weights before the update, in nats"),
    ("reference_logprob", "Log-prob (reference)", "sequential", None, "by the reference model, in nats"),
    ("difference", "Trainer - engine", "diverging", 0, "difference of the two log-probabilities, in nats"),
    ("ratio", "Ratio", "diverging", 1, "probability by the trainer over that by the engine"),
    ("entropy", "Entropy", "sequential", None, "of the distribution that the token was sampled from, in nats"),
    (
        "clipped",
        "Clipped",
        "flag",
        None,
        "the ratio is outside of the clip range, on the side that the advantage pushes to",
    ),
    ("mask", "Trained on", "flag", None, "whether the token is in the loss"),
    ("version", "Weights", "category", None, "version of the weights that sampled the token"),
)


def describe_trajectory(
    run: Run, rows: Sequence[Json], decode: Decode | None, clip: tuple[float, float] | None
) -> Json:
    """Return everything of one trajectory but its neighbours, given its turns in order."""
    head, first = rows[0], next((row for row in rows if row["prompt"]), rows[0])
    prompt, first_messages = _parsed(first["prompt"], []), _parsed(first["first_messages"], [])
    recorded = [row for row in rows if row["turn"] is not None]
    place = {row["turn"]: index for index, row in enumerate(recorded)}
    turns: list[Json] = []
    for index, row in enumerate(recorded):
        parent = place.get(row["parent"])
        before = turns[parent] if parent is not None else None
        added, response = row["added_token_ids"] or [], row["response_token_ids"] or []
        context = len(added) + (before["context_tokens"] + len(before["tokens"]["ids"]) if before else 0)
        turns.append(
            {
                "turn": index,
                "parent": parent,
                "children": [],
                "depth": before["depth"] + 1 if before else 0,
                "reward": _finite(row["reward"]),
                "stop_reason": row["stop_reason"],
                "text": row["text"] or "",
                "messages": before["observations"] if before else first_messages or prompt,
                "observations": _parsed(row["observations"], []),
                "tool_calls": _parsed(row["tool_calls"], []),
                "context_tokens": context,
                "added": {"ids": added, "texts": decode(added) if decode else None},
                "tokens": {"ids": response, "texts": decode(response) if decode else None} | token_columns(row, clip),
            }
        )
        if before:
            before["children"].append(index)
    kind = head["failure_kind"]
    failure = {"kind": kind, "message": head["failure_message"], "turn": head["failure_turn"]} if kind else None
    is_trained = run.kind == "skyrl" and head["purpose"] in ("train", "failed")
    return {
        "run": run.id,
        "purpose": head["purpose"],
        "step": head["global_step"],
        "uid": head["uid"],
        "sample": head["sample"],
        "environment": head["env_class"],
        "dataset": head["dataset"],
        "outcome": head["outcome"],
        "failure": failure,
        "error": head["error"],
        "reward": _finite(head["trajectory_reward"]),
        "greedy_reward": _finite(head["greedy_reward"]),
        **{name: _parsed(first[name], {}) for name in ("rewards", "metrics", "extras")},
        "prompt": prompt,
        "first_messages": first_messages,
        "tools": _parsed(first["tools"], []),
        "turns": turns,
        "columns": _column_facts(turns),
        "is_tree": any(len(turn["children"]) > 1 for turn in turns)
        or sum(turn["parent"] is None for turn in turns) > 1,
        "texts_from": "tokenizer" if decode else None,
        "reexecute": f"skyrl-capsule run {shlex.quote(str(run.root))} --step {head['global_step']}"
        if is_trained and (run.root / "capsules" / f"step_{head['global_step']:06d}").is_dir()
        else None,
    }


def describe_samples(rows: Sequence[Json]) -> list[Json]:
    """Return the samples of one prompt, side by side, without their tokens."""
    samples: dict[int, Json] = {}
    for row in rows:
        sample = samples.get(row["sample"])
        if sample is None:
            names = ("sample", "outcome", "failure_kind", "failure_message", "num_turns")
            sample = {name: row[name] for name in names} | {
                "reward": _finite(row["trajectory_reward"]),
                "tokens": 0,
                "turns": [],
            }
            sample |= {name: _parsed(row[name], {}) for name in ("rewards", "metrics")}
            samples[row["sample"]] = sample
        if row["turn"] is not None:
            tokens = len(row["response_token_ids"] or [])
            sample["tokens"] += tokens
            sample["turns"].append(
                {
                    **{name: row[name] for name in ("turn", "parent", "stop_reason")},
                    "text": row["text"] or "",
                    "observations": _parsed(row["observations"], []),
                    "reward": _finite(row["reward"]),
                    "tokens": tokens,
                }
            )
    return list(samples.values())


def token_columns(row: Mapping[str, Any], clip: tuple[float, float] | None) -> Json:
    """Return what is known of each response token of a turn; None for a column that was not recorded."""
    num_tokens = len(row["response_token_ids"] or [])

    def column(name: str) -> list[float | None] | None:
        values = row[name]
        return [_finite(value) for value in values] if values and len(values) == num_tokens else None

    mask = list(row["loss_mask"]) if row["loss_mask"] and len(row["loss_mask"]) == num_tokens else None

    def trained(name: str) -> list[float | None] | None:
        """What the trainer knows: nothing of tokens that it does not train on."""
        values = column(name)
        return [each if kept else None for each, kept in zip(values, mask)] if values and mask else values

    engine, policy, advantage = column("logprobs"), trained("policy_logprobs"), trained("advantages")
    difference = ratio = clipped = None
    if engine and policy:
        difference = [None if a is None or b is None else round(b - a, 7) for a, b in zip(engine, policy)]
        ratio = [None if each is None else _finite(math.exp(min(each, 700.0))) for each in difference]
    if ratio and advantage and clip:
        low, high = clip
        clipped = [
            None if r is None or a is None else (r > 1 + high and a > 0) or (r < 1 - low and a < 0)
            for r, a in zip(ratio, advantage)
        ]
    return {
        "logprob": engine,
        "policy_logprob": policy,
        "reference_logprob": trained("reference_logprobs"),
        "difference": difference,
        "advantage": advantage,
        "entropy": trained("entropies"),
        "ratio": ratio,
        "clipped": clipped,
        "mask": mask,
        "version": _versions(row["versions"], num_tokens),
    }


def find_decoder(run: Run, config: Mapping[str, Any]) -> Decode | None:
    """Return what gives the text of each token, from the run's tokenizer where it is on this machine; else None. No network
    is asked."""
    names = [config.get("model.tokenizer_path"), config.get("model.path")]
    folders = [path for name in names if isinstance(name, str) and name for path in _places(name)]
    if (digest := str(config.get("model.revision"))).startswith("sha256:"):  # of a GGUF, which was converted
        folders += cache_folder("models").glob(f"*-{digest[7:23]}")
    folders += [run.folder.export, *sorted(run.root.glob("checkpoints/*/"))]
    for path in [folder if folder.suffix == ".json" else folder / "tokenizer.json" for folder in folders]:
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                return _decoder_of(Tokenizer.from_file(str(path)))
            except Exception:  # whatever the library raises for a file that is no tokenizer
                continue
    return None


def _places(name: str) -> list[Path]:
    if name.startswith(_BUILTIN):
        return [Path(assets.__file__).parent / name.removeprefix(_BUILTIN)]
    if Path(name).is_dir():
        return [Path(name)]
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer.json")
    except Exception:  # a name that is none
        return []
    return [Path(cached)] if isinstance(cached, str) else []


def _decoder_of(tokenizer: Any) -> Decode:
    known: dict[int, str] = {}

    def one(token_id: int) -> str:
        if token_id not in known:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            piece = tokenizer.id_to_token(token_id) or ""
            known[token_id] = f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text
        return known[token_id]

    def decode(ids: Sequence[int]) -> list[str]:
        texts = [one(token_id) for token_id in ids]
        start = None
        for index, text in enumerate(texts):
            if "\ufffd" not in text:
                start = None
                continue
            start = index if start is None or index - start >= _LONGEST_CHARACTER else start
            whole = tokenizer.decode(list(ids[start : index + 1]), skip_special_tokens=False)
            if "\ufffd" not in whole:  # a character of several tokens stands at its last one
                texts[start : index + 1] = [*[""] * (index - start), whole]
                start = None
        return texts

    return decode


def _column_facts(turns: Sequence[Json]) -> list[Json]:
    facts = []
    for name, label, kind, centre, meaning in _COLUMNS:
        columns = [turn["tokens"][name] for turn in turns if turn["tokens"][name] is not None]
        if columns:
            values = [value for column in columns for value in column if value is not None]
            low, high = (min(values), max(values)) if values and kind != "flag" else (None, None)
            about = {"name": name, "label": label, "meaning": meaning, "kind": kind, "centre": centre}
            facts.append({**about, "min": low, "max": high})
    return facts


def _versions(runs: Sequence[Mapping[str, int]] | None, num_tokens: int) -> list[int | None] | None:
    if not runs:
        return None
    versions: list[int | None] = [None] * num_tokens
    for each in runs:
        start = max(0, each["start"])
        versions[start:] = [each["version"]] * max(0, num_tokens - start)
    return versions


def _parsed(text: str | None, missing: Any) -> Any:
    """JSON as it was meant; a text that is none stays what it is."""
    if not text:
        return missing
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [{"role": "", "content": text}] if missing == [] else {"text": text}
    return missing if value is None else value


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
