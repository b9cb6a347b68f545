"""Alerts: what somebody should look at, told once, where it begins to hold, on the console, by trackers and functions.

    stalled    no step was finished for `alerts.stalled_after_s`; told while the run waits, from a thread of its own
    failed     the run ends by an error, or loses a worker
    entropy, reward, length, failures      a step's metric left its range; told again once it has been back in it
    mismatch, mismatch_growth, kl_at_lr_0  so, too: the engine's log-probabilities are not the trainer's
    the name of a rule of `skyrl-doctor`   what its rules find in the run so far; told once, from a thread of its own

They read and change nothing. A custom function that raises or hangs is warned about, and costs nothing but itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from skyrl_train.config import AlertsConfig
from skyrl_train.errors import ActorLostError, StopRequested
from skyrl_train.parts import ALERTS
from skyrl_train.registry import part_name
from skyrl_train.system import in_time
from skyrl_train.telemetry.logs.console import RunConsole
from skyrl_train.telemetry.logs.redaction import redact_text

_WEIGHTS = (
    "Do the engines get the weights (generator.verify_weight_sync=true, weight_sync.jsonl)? Do they compute in another type "
    "(generator.vllm.dtype) or with rounded weights (generator.quantization)? Recorded rollouts are of other weights"
)
_CAUSES = {
    "mismatch": f". {_WEIGHTS}",
    "mismatch_growth": f". {_WEIGHTS}",
    "kl_at_lr_0": ": nothing was trained, so that dropout, types or the engine's log-probabilities make it. Try "
    "model.dtype=float32, and trainer.algorithm.proximal=recompute where it is behaviour",
}
_FIRST_STEPS, _LEAST_MISMATCH = 5, 0.001
_TELL_TIMEOUT_S = 30.0
"""For a custom function, which may wait for a network; it is left to itself then."""
_EXAMINE_TIMEOUT_S = 10.0
"""For rules that still read when the steps are over; they are left to themselves then, and tell nothing."""
_FIRST_EXAMINED = 20
"""Steps after which rules are asked first; then each time that the run has twice as many."""
Tell = Callable[[int, str, str], None]
"""Called with step, title and text; `Trackers.alert`."""
Examine = Callable[[], Iterable[tuple[str, str]]]
"""Reads the run's folder, and gives the names of the rules that find something with what they find."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One thing that somebody should look at."""

    kind: str
    """`stalled`, `failed`, the setting's name without `_above` or `_below`, or the name of a rule."""
    step: int
    """Training steps that were finished."""
    run_name: str
    text: str
    """What happened, with the number and the setting that it is held against; without secrets."""


class Alerts:
    """Watches one run. Silent where no setting of `alerts` asks for anything."""

    def __init__(
        self,
        settings: AlertsConfig,
        console: RunConsole,
        tell: Tell,
        *,
        run_name: str,
        examine: Examine | None = None,
    ) -> None:
        """Raises ConfigError where a function of `alerts.on_alert` cannot be found."""
        self._settings, self._console, self._tell, self._run_name = settings, console, tell, run_name
        self._functions = {part_name(spec): ALERTS.resolve(spec) for spec in settings.on_alert}
        self._ranges = (
            ("entropy", "policy/entropy", settings.entropy_below, None),
            ("reward", "reward/mean", settings.reward_below, settings.reward_above),
            ("length", "response_length/mean", settings.length_below, settings.length_above),
            ("failures", "failures/fraction", None, settings.failures_above),
            ("mismatch", "mismatch/ratio_outside_10_percent", None, settings.mismatch_above),
            ("mismatch_growth", "growth of mismatch/logprob_diff_mean", None, settings.mismatch_growth_above),
            ("kl_at_lr_0", "policy/approx_kl at policy/lr=0", None, settings.kl_at_lr_0_above),
        )
        self._outside: set[str] = set()
        self._first_mismatches: list[float] = []
        self._step, self._last = 0, time.monotonic()
        self._is_over = threading.Event()
        self._examine = examine if settings.findings else None
        self._examined_at = _FIRST_EXAMINED
        self._examining: threading.Thread | None = None
        self._told_rules: set[str] = set()

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Wraps the steps of a run that begins after `step`."""
        self._step, self._last = step, time.monotonic()
        self._examined_at = max(_FIRST_EXAMINED, step + _FIRST_EXAMINED // 2)
        self._is_over.clear()
        if self._settings.stalled_after_s:
            threading.Thread(target=self._watch, name="alerts", daemon=True).start()
        try:
            yield
        except StopRequested:
            raise
        except Exception as error:
            if self._settings.failed:
                lost = isinstance(error, ActorLostError)  # which may be answered by another attempt
                what = (
                    "a worker was lost; trainer.max_restarts says whether the run goes on" if lost else "the run ends"
                )
                self.send("failed", f"{what}: {type(error).__name__}: {error}")
            raise
        finally:
            self._is_over.set()
            if self._examining is not None:
                self._examining.join(_EXAMINE_TIMEOUT_S)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare a finished step's metrics with their ranges."""
        self._step, self._last = step, time.monotonic()
        metrics = self._measured(metrics)
        for kind, name, low, high in self._ranges:
            value = metrics.get(name)
            if value is None:
                continue
            rule = ""
            if low is not None and not value >= low:  # a NaN is outside of every range
                rule = f"below alerts.{kind}_below={low:g}"
            elif high is not None and not value <= high:
                rule = f"above alerts.{kind}_above={high:g}"
            if rule and kind not in self._outside:
                self.send(kind, f"{name} is {value:.4g}, {rule}{_CAUSES.get(kind, '')}")
            (self._outside.add if rule else self._outside.discard)(kind)
        is_examining = self._examining is not None and self._examining.is_alive()
        if self._examine is not None and step >= self._examined_at and not is_examining:
            self._examined_at = 2 * step
            self._examining = threading.Thread(target=self._ask_rules, name="doctor", daemon=True)
            self._examining.start()

    def _ask_rules(self) -> None:
        """Tell of each rule that finds something, once, while the run goes on."""
        assert self._examine is not None, "it is asked where there is one"
        try:
            for name, text in self._examine():
                if name not in self._told_rules and not self._is_over.is_set():
                    self._told_rules.add(name)
                    self.send(name, text)
        except Exception as error:  # of whatever kind: what only reads must not end the run
            self._console.warn(f"the run could not be examined ({type(error).__name__}: {error})")

    def _measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with what follows from them, and without the mismatch of tokens of older weights."""
        is_stale = metrics.get("off_policy/age/max", 0.0) > 0
        found = {name: value for name, value in metrics.items() if not (is_stale and name.startswith("mismatch/"))}
        if (mismatch := found.get("mismatch/logprob_diff_mean")) is not None:
            self._first_mismatches = [*self._first_mismatches, mismatch][:_FIRST_STEPS]
            usual = max(_LEAST_MISMATCH, median(self._first_mismatches))
            found["growth of mismatch/logprob_diff_mean"] = mismatch / usual
        if found.get("policy/lr") == 0 and "policy/approx_kl" in found:
            found["policy/approx_kl at policy/lr=0"] = found["policy/approx_kl"]
        return found

    def send(self, kind: str, text: str) -> None:
        """Tell everybody of an alert."""
        text = redact_text(text)
        alert = Alert(kind=kind, step=self._step, run_name=self._run_name, text=text)
        self._console.warn(f"alert ({kind}) after step {self._step}: {text}")
        self._tell(self._step, f"{self._run_name}: {kind}", text)
        for name, function in self._functions.items():
            try:
                in_time(partial(function, alert), what="the function", timeout_s=_TELL_TIMEOUT_S)
            except Exception as error:  # of whatever kind: a function of the user's must not end the run
                self._console.warn(f"alerts.on_alert: {name} failed ({type(error).__name__}: {error})")

    def _watch(self) -> None:
        limit_s, told = self._settings.stalled_after_s, -1
        while not self._is_over.wait(min(1.0, limit_s / 4)):
            waited_s = time.monotonic() - self._last
            if waited_s >= limit_s and told != self._step:
                told = self._step
                self.send("stalled", f"no step was finished for {waited_s:.0f} s (alerts.stalled_after_s={limit_s:g})")
