"""`skyrl-doctor RUN [RUN2]`: what is wrong with a run, worst first, since which step, and which rows prove it.
`skyrl-doctor audit RUN`: whether what it recorded can be computed again from its checkpoints.
`skyrl-doctor compare MODEL --engine hf|vllm|URL`: whether trainer and engine make the same of the same texts.

RUN is the output_dir of a run that is going on or over, or what TRL and verl dump of completions. It is read and never
written to. Exit status 1 where something worse than a note is found, 2 where RUN cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.doctor import MAX_FINDINGS, as_json, as_text, custom_rule, examine
from skyrl_train.errors import SkyrlTrainError
from skyrl_train.system import find_modules_here
from skyrl_train.telemetry.reading import find_runs


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-doctor`; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    find_modules_here()
    try:
        commands = {"audit": _audit, "compare": _compare}
        command = commands.get(arguments[0]) if arguments else None
        return _examine(arguments) if command is None else command(arguments[1:])
    except SkyrlTrainError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


def _examine(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="skyrl-doctor",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="MODULE:FUNCTION", help="a rule of your own, too"
    )
    parser.add_argument("--all", action="store_true", help=f"all findings, where there are more than {MAX_FINDINGS}")
    parser.add_argument("--json", action="store_true", help="all findings as one JSON list, an object a run")
    options = parser.parse_args(arguments)
    own_rules = {target: custom_rule(target) for target in options.rule}
    examined = [examine(run, own_rules) for run in find_runs(options.runs)]
    if options.json:
        told = json.dumps([as_json(findings, tables) for findings, tables in examined], indent=1, ensure_ascii=False)
    else:
        most = sys.maxsize if options.all else MAX_FINDINGS
        told = "\n\n".join(as_text(findings, tables, most=most) for findings, tables in examined)
    sys.stdout.write(f"{told}\n")
    return int(any(each.level != "note" for findings, _ in examined for each in findings))


def _audit(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="skyrl-doctor audit",
        description="Computes log-probabilities, advantages and rewards again, from the checkpoints of RUN.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's output folder")
    parser.add_argument(
        "--step", type=int, action="append", default=[], metavar="N", help="this step alone; may come again"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: idle threads spin on busy cores
    from skyrl_train.runs.checks import audit

    lines = list(audit.audit(options.run, options.step))
    sys.stdout.write(f"{audit.table(lines)}\n")
    return int(not all(line.holds for line in lines))


def _compare(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="skyrl-doctor compare",
        description="Compares the distributions of trainer and engine over the whole vocabulary, at each position of texts. "
        "Settings say how both compute: model.dtype=bfloat16 trainer.layout=packed generator.vllm.dtype=float32.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, hub name or builtin:NAME, as model.path")
    parser.add_argument(
        "--engine", default="hf", help="hf, vllm, or the URL of a server of this model (its top tokens)"
    )
    parser.add_argument("--texts", type=Path, help="a file with one text a line; else the model writes some")
    parser.add_argument("--number", type=int, default=16, help="texts (16)")
    parser.add_argument(
        "--tokens", type=int, default=128, help="the most tokens that are read of a text, or written (128)"
    )
    parser.add_argument("--top-k", type=int, default=20, help="likeliest tokens that are counted alike (20)")
    parser.add_argument("--picture", type=Path, help="a PNG or SVG file of the KL by position")
    parser.add_argument("--most", type=float, metavar="NATS", help="exit status 1 where a position's KL is above this")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from skyrl_train.runs.checks import compare

    found, config, tokenizer = compare.compare(
        options.model,
        options.engine,
        texts=options.texts,
        number=options.number,
        tokens=options.tokens,
        top_k=options.top_k,
        overrides=options.settings,
    )
    title = f"{options.model}: trainer {config.model.dtype}, {config.trainer.layout} rows; engine {options.engine}"
    sys.stdout.write(f"{title}\n\n{compare.table(found, tokenizer)}\n")
    if options.picture is not None:
        compare.draw(found, options.picture, title)
    return int(options.most is not None and not float(found.kl.max()) <= options.most)


if __name__ == "__main__":
    sys.exit(main())
