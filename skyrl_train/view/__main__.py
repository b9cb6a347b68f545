"""`skyrl-view RUN [RUN ...]`: what runs did and do, in the browser; `--export report.html` writes it into one file, and
`--terminal` prints tables of samples.

RUN is the output_dir of a run that is going on or over, a folder of such, or what TRL and verl dump of completions. They are
read and never written to. The page is served on 127.0.0.1 to whoever has the address that is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import skyrl_train
from skyrl_train.errors import SkyrlTrainError, counted
from skyrl_train.system import install_command
from skyrl_train.system.files import write_atomically
from skyrl_train.telemetry.reading import find_runs
from skyrl_train.view.terminal import show

_NEEDED = ("duckdb", "starlette", "uvicorn")
"""By all but `--terminal`."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `skyrl-view`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="skyrl-view", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--export", type=Path, metavar="REPORT", help="write one self-contained HTML file, and end")
    parser.add_argument("--limit", type=int, help="trajectories: 200 in a report, 10 in a terminal")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    parser.add_argument("--terminal", action="store_true", help="print tables of samples here, and end")
    parser.add_argument("--step", type=int, help="with --terminal: of this step; else of the last")
    args = parser.parse_args(argv)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing and not args.terminal:
        sys.stderr.write(f"skyrl-view needs {', '.join(missing)}: {install_command('view')}, in Python 3.11 or later\n")
        return 2
    signal.signal(signal.SIGTERM, _end)
    try:
        if args.terminal:
            show(args.runs, step=args.step, limit=args.limit or 10)
        else:
            with tempfile.TemporaryDirectory(prefix="skyrl-view-") as folder:
                _view(args, Path(folder))
    except (SkyrlTrainError, ValueError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _view(args: argparse.Namespace, folder: Path) -> None:
    from skyrl_train.view.answers import Answers
    from skyrl_train.view.export import write_report
    from skyrl_train.view.rollouts import RolloutIndex
    from skyrl_train.view.server import STATIC, make_app, new_token, serve

    runs = find_runs(args.runs)
    index = RolloutIndex(folder, runs)
    answers = Answers(runs, index, version=skyrl_train.__version__)
    if args.export is not None:
        report = write_report(answers, [("limit", str(args.limit or 200))], STATIC)
        write_atomically(args.export, report.encode())
        sys.stdout.write(f"{args.export}: {len(report) / 1e6:.1f} MB, {counted(len(runs), 'run')}\n")
        return
    token = new_token()

    def announce(port: int) -> None:
        address = f"http://127.0.0.1:{port}/?token={token}"
        sys.stdout.write(f"{address}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        # Without a screen, a browser of the terminal would take it over.
        has_screen = sys.platform in ("darwin", "win32") or any(map(os.getenv, ("DISPLAY", "WAYLAND_DISPLAY")))
        if not args.no_browser and has_screen:
            webbrowser.open(address)

    serve(make_app(answers, token=token), port=args.port, announce=announce)


def _end(signal_number: int, frame: object) -> None:
    """End as at Ctrl-C, so that the temporary folder is removed."""
    del frame
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main())
