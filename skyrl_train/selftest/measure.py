"""`python -m skyrl_train.selftest --measure`: the rates of this machine's device, what is worth most first.

    pieces --each under a deadline--> rates.json and rates.md, written anew after each: a call that is cut off has learnt
                                  --> on CUDA the user's cache, too, from which runs derive `platform.rates`

What a CPU does is not kept for runs: on all of them the stated rates decide, so that they cut rows alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from skyrl_train.batch.layouts import rates_file, rates_of
from skyrl_train.model.sizes import remember
from skyrl_train.selftest.cases import Case
from skyrl_train.selftest.machine import Machine
from skyrl_train.selftest.processes import CaseResult

BEGIN, END = "<!-- measured: written by python -m skyrl_train.selftest --measure -->", "<!-- end of measured -->"
_LAYOUTS = ("packed", "prefix_shared", "padded")
_TINY = "tiny"


def pieces(machine: Machine, output: Path, *, tiny: bool = False) -> list[Case]:
    """All of them, in the order in which they are worth their time; those of a CPU, and `tiny` ones, are of tiny sizes."""
    real = machine.device == "cuda" and not tiny
    shapes, positions = (("1.5B", "0.5B", "7B"), (16384, 65536, 262144)) if real else ((_TINY,), (256, 1024))
    load = ("0.5B", 64, 128) if real else (_TINY, 8, 16)
    side, read_numbers, copied = (8192, 1 << 30, 1 << 30) if real else (512, 1 << 22, 1 << 24)
    updates = list(_updates(shapes, positions, profiles=str((output / "profiles").resolve())))
    num_first = len(shapes) + len(positions) + len(_LAYOUTS)  # that differ in one setting at most
    return [
        _piece("products", "products", side=side, read_numbers=read_numbers),
        *(
            _piece(f"attention/{kernel}/{shape}", "attention", shape=shape, kernel=kernel, positions=positions[0])
            for shape, kernel in product(shapes, ("flash", "flex"))
        ),
        *updates[:num_first],
        _piece("copies", "copies", num_bytes=copied),
        *(
            Case(
                name=f"engine/{name}",
                body="pieces:engine",
                arguments={"name": name, **dict(zip(("shape", "requests", "new_tokens"), load))},
                packages=("vllm",) if name == "vllm" else (),
            )
            for name in ("hf", "vllm")
        ),
        *updates[num_first:],
    ]


def _piece(name: str, body: str, **arguments: Any) -> Case:
    deadline_s = 240.0 if arguments.get("compiled") else 150.0
    return Case(name=name, body=f"pieces:{body}", arguments=arguments, deadline_s=deadline_s, shares_process=True)


def _updates(shapes: Sequence[str], positions: Sequence[int], *, profiles: str) -> Iterator[Case]:
    """Updates of all settings, of which the first is the usual one: those that differ from it in the fewest come first. The
    usual ones, packed and shared, are traced too."""
    # The last ones vary first: what is learnt of layouts is worth more than what is learnt of lengths.
    names = ("positions", "checkpointing", "compiled", "layout", "shape")
    options: tuple[Sequence[Any], ...] = (positions, (True, False), (False, True), _LAYOUTS, shapes)
    usual = {name: values[0] for name, values in zip(names, options)}
    settings = [dict(zip(names, chosen)) for chosen in product(*options)]
    for each in sorted(settings, key=lambda each: len(each.items() - usual.items())):
        is_traced = not each.items() - usual.items() or each == usual | {"layout": _LAYOUTS[1]}
        forms = "compiled" if each["compiled"] else "eager", "checkpointed" if each["checkpointing"] else "kept"
        name = "/".join(("update", each["shape"], each["layout"], *forms, str(each["positions"])))
        yield _piece(name, "update", **each | ({"profiles": profiles} if is_traced else {}))


def write(
    cases: Sequence[Case], results: Sequence[CaseResult], machine: Machine, output: Path, docs: Path | None
) -> None:
    """Write what was found so far: files in `output`, the table of a page, and on CUDA the user's cache."""
    device = machine.devices[0]["name"] if machine.devices else "cpu"
    found = [
        {
            "piece": result.name,
            "outcome": result.outcome,
            "seconds": round(result.seconds, 1),
            "figure": result.detail,
            **case.arguments,
            **(result.value or {}),
        }
        for case, result in zip(cases, results)
    ]
    content = {
        "format": 1,
        "device": device,
        "measured_on": date.today().isoformat(),
        "versions": dict(machine.versions),
        "rates": _rates(found, device),
        "num_pieces": len(cases),
        "pieces": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "rates.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (output / "rates.md").write_text(_markdown(content), encoding="utf-8")
    if docs is not None:
        before, _, rest = docs.read_text(encoding="utf-8").partition(BEGIN)
        docs.write_text(f"{before}{BEGIN}\n{_markdown(content)}{END}{rest.partition(END)[2]}", encoding="utf-8")
    is_rehearsal = any(case.arguments.get("shape") == _TINY for case in cases)
    if machine.device == "cuda" and content["rates"] and not is_rehearsal:
        remember(rates_file(device), content)


def _rates(found: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any] | None:
    """For `platform.rates`, by the first shape's kernels; None until products and attention are known. Where flex attention
    is not, it is taken for as much slower as it is stated to be."""
    by_piece = {"/".join(each["piece"].split("/")[:2]): each for each in reversed(found) if each["outcome"] == "pass"}
    products, flash, flex = (by_piece.get(name) for name in ("products", "attention/flash", "attention/flex"))
    if products is None or flash is None:
        return None
    stated = rates_of(device)
    slower = (stated.flex_flops or stated.attention_flops) / stated.attention_flops
    return {
        "device": device,
        "measured_on": date.today().isoformat(),
        "attention_flops": flash["flops"],
        "flex_flops": flex["flops"] if flex else slower * flash["flops"],
        **{name: products[name] for name in ("linear_flops", "kernel_s", "read_bytes")},
    }


def _markdown(content: Mapping[str, Any]) -> str:
    """The table; utilisation is of the rate of a large product."""
    peak = (content["rates"] or {}).get("linear_flops")
    count = f"{len(content['pieces'])} of {content['num_pieces']} pieces"
    title = f"{content['device']}, {content['measured_on']}, torch {content['versions'].get('torch', '?')}: {count}."
    lines = [title, "", "| piece | found | s |", "|---|---|---|"]
    for each in content["pieces"]:
        share = f", MFU {each['flops'] / peak:.0%}" if peak and each.get("tokens_per_s") else ""
        told = each["figure"] if each["outcome"] == "pass" else f"{each['outcome']}: {each['figure']}"
        lines.append(f"| `{each['piece']}` | {told}{share} | {each['seconds']} |")
    return "\n".join(lines) + "\n"
