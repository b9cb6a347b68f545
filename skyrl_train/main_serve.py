"""`skyrl-serve model.path=... [GROUP=NAME ...] [KEY=VALUE ...]`: serves Tinker's API on 127.0.0.1.

Settings are those of a training run, as far as they say what a model is and where it computes. --also adds base models, with
names and `model=` or `model.*` settings of their own. What clients do is kept in --folder: the same command with the same
folder goes on where the server was, however it ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from skyrl_train import config as schema, runs
from skyrl_train.config import derived
from skyrl_train.errors import ConfigError, SkyrlTrainError, Violation
from skyrl_train.runs import cli
from skyrl_train.system import install_command
from skyrl_train.system.files import keep_private, write_atomically

_NEEDED = ("tinker", "starlette", "uvicorn", "peft")
_KEY = re.compile(r"(tml-\S{8,}) ([A-Za-z0-9._-]{1,64})")
_OF_MODEL = re.compile(r"\+*model[=.]")
OF_SERVER = ("generator=hf", "strategy=single", "data=word_problems", "generator.sampling.temperature=1.0")
"""On every platform, unless stated otherwise. No data is read: that of a GPU would have to be fetched."""
_EXAMPLE = """
export TINKER_BASE_URL={url} TINKER_API_KEY={key}

import tinker
client = tinker.ServiceClient().create_lora_training_client(base_model={model!r}, rank=8)
datum = tinker.Datum(tinker.ModelInput.from_ints([1, 2, 3]), {{"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}})
client.forward_backward([datum], "cross_entropy").result()
client.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-serve`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="skyrl-serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=Path("outputs/serve"), help="journal, adapters, keys")
    parser.add_argument("--host", default="127.0.0.1", help="elsewhere only behind a proxy that speaks TLS")
    parser.add_argument("--port", type=int, default=8787, help="0: a free one")
    parser.add_argument(
        "--keys", type=Path, help="lines of a key and its tenant; one is made in the folder unless given"
    )
    parser.add_argument("--name", help="the base model's name for clients, ORG/NAME; unless given that of model.path")
    parser.add_argument(
        "--also",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "model.KEY=VALUE"),
        help="another base model, with the first one's other settings; behind them",
    )
    each = "of each tenant, at most: "
    parser.add_argument("--max-adapters", type=_at_least_1, default=2000, help=f"{each}models that are not unloaded")
    parser.add_argument("--max-bytes", type=_at_least_1, default=256 << 30, help=f"{each}of its checkpoints on disk")
    parser.add_argument("--max-requests", type=_at_least_1, default=20_000, help=f"{each}requests without an outcome")
    parser.add_argument(
        "--models-in-memory", type=_at_least_1, default=64, metavar="N", help="of which more wait in the folder"
    )
    parser.add_argument(
        "--full-for", default="", metavar="TENANT", help="who may train all weights of a model, one model at a time"
    )
    args = parser.parse_intermixed_args(argv)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"skyrl-serve needs {', '.join(missing)}: {install_command('serve')}, in Python 3.11 or later\n"
        )
        return 2
    signal.signal(signal.SIGTERM, _end)
    try:
        _serve(args)
    except (SkyrlTrainError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """End as by Ctrl-C: workers on Ray would outlive a process that a signal ends."""
    del frame
    raise SystemExit(128 + number)


def _serve(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    keep_private(args.folder)
    tenants = read_keys(args.keys or _own_keys(args.folder))
    key = next(iter(tenants))
    if args.full_for and args.full_for not in tenants.values():
        rule, remedy = "must be a tenant of --keys", f"take one of {', '.join(sorted(set(tenants.values())))}"
        raise ConfigError([Violation.of("--full-for", args.full_for, rule, remedy)])

    def announce(port: int, model: str) -> None:
        url = f"http://{args.host}:{port}"
        sys.stdout.write(_EXAMPLE.format(url=url, key=key, model=model) + "\n")
        sys.stdout.flush()

    words = [*OF_SERVER, *args.settings, f"output_dir={args.folder.absolute()}"]
    bases: dict[str, schema.Config] = {}
    for given, *own in [[args.name], *args.also]:
        common = [word for word in words if not (own and _OF_MODEL.match(word))]
        config = cli.checked_config([*common, *own], config_name="config")
        assert isinstance(config, schema.Config)
        name = given or _name_of(config.model.path)
        if not all(map(_OF_MODEL.match, own)) or name in bases or (bases and not own):
            rule, remedy = "must be a new name and settings of a model", "write --also ORG/NAME model.path=..."
            raise ConfigError([Violation.of("--also", " ".join([name, *own]), rule, remedy)])
        bases[name] = runs.for_server(config)
    runs.serve(
        next(iter(bases.values())),
        {
            name: (derived.learner_settings(each, "policy"), each.generator, each.data.images)
            for name, each in bases.items()
        },
        folder=args.folder,
        tenants=tenants,
        host=args.host,
        port=args.port,
        max_adapters=args.max_adapters,
        max_bytes=args.max_bytes,
        max_requests=args.max_requests,
        models_in_memory=args.models_in_memory,
        full_for=args.full_for,
        announce=announce,
    )


def _name_of(path: str) -> str:
    """Return `ORG/NAME` of a path or a hub name; clients look a tokenizer up by it."""
    parts = [part for part in path.replace(":", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(["local", *parts][-2:])


def _at_least_1(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on; got {word!r}")
    return int(word)


def read_keys(path: Path) -> Mapping[str, str]:
    """Return the tenant of each key. Raises ConfigError naming the line that is none, OSError."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _KEY.fullmatch(line.strip())
        if not line.strip() or line.startswith("#"):
            continue
        if match is None or match[1] in found:
            rule, remedy = (
                "must be a new key and a tenant's name",
                f"write {path} as `tml-... NAME`, a line for each key",
            )
            raise ConfigError([Violation(field=f"--keys line {number}", rule=rule, value="(a key)", remedy=remedy)])
        found[match[1]] = match[2]
    if not found:
        rule, remedy = "must have a key", "write `tml-... NAME`, a line for each key"
        raise ConfigError([Violation(field="--keys", rule=rule, value=str(path), remedy=remedy)])
    return found


def _own_keys(folder: Path) -> Path:
    path = folder / "keys"
    if not path.exists():
        write_atomically(path, f"tml-{secrets.token_urlsafe(24)} owner\n".encode())
        path.chmod(0o600)
    return path


if __name__ == "__main__":
    sys.exit(main())
