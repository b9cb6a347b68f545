"""Bugs that others had, or might have, as small changes of the product's code: each must be found without being looked for.

A bug is a text within a function, and what stands in its place. The function is compiled anew while the bug is in.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A planted bug."""

    name: str
    patches: tuple[tuple[str, str, str], ...]
    """Each a function, `module:Class.method` or `module:function`, a text that occurs once in it, and what replaces it."""


_STREAM = "skyrl_train.rollout.stream.stream:RolloutStream"
_ADMISSION = "skyrl_train.rollout.admission"
_FOLDER = "skyrl_train.trainers.checkpoints.folder"
_PPO = "skyrl_train.trainers.ppo:PPOTrainer"
_HOSTS = "skyrl_train.rollout.hosts.threads:ThreadEnvironments.call"
_ADAPTERS = "skyrl_train.serve.models:Models._take"
_ACCEPT = "skyrl_train.serve.ledger:Ledger._accept"

LISTED = (
    Bug(
        name="a lost wake-up",
        patches=(
            (
                f"{_STREAM}._run",
                "await self._journal.keep_group",
                "self._changed.set()\n                await self._journal.keep_group",
            ),
            (f"{_STREAM}._run", "(ordinal, None)\n            self._changed.set()", "(ordinal, None)"),
        ),
    ),
    Bug(
        name="a publish before the sync",
        patches=(
            (f"{_PPO}.train", "self._sync(step)\n", "pass\n"),
            (f"{_PPO}.train", "publish(step)\n", "publish(step)\n                        self._sync(step)\n"),
        ),
    ),
    Bug(
        name="a journal written before its data",  # a batch before the groups that it is made of
        patches=(
            (
                f"{_STREAM}._run",
                "await self._journal.keep_group(ordinal, prompt, trajectories)\n"
                "            self._finish(ordinal, (prompt, trajectories))",
                "self._finish(ordinal, (prompt, trajectories))\n                self._changed.set()\n"
                "                await asyncio.sleep(0.01)\n"
                "                await self._journal.keep_group(ordinal, prompt, trajectories)\n"
                "            else:\n                self._finish(ordinal, (prompt, trajectories))",
            ),
        ),
    ),
    Bug(
        name="a lease not released on cancel",
        patches=(
            (
                "skyrl_train.serve.models:Models.sampled_from",
                "try:\n                yield _InEngine(self.engine, saved.name, sampler=self._sampler)\n"
                "            finally:\n                self.release(saved.name)",
                "yield _InEngine(self.engine, saved.name, sampler=self._sampler)\n            self.release(saved.name)",
            ),
        ),
    ),
    Bug(
        name="double admission after a restart",
        patches=((f"{_STREAM}._go_on", "self._rules.restore(ordinal, min(began_at, version))", "pass"),),
    ),
    Bug(
        name="a late answer of what was given up is accepted",
        patches=(
            (f"{_STREAM}._batch", "task.cancel()", "self._tasks.setdefault(ordinal, task)"),
            (f"{_STREAM}._finish", "if ordinal not in self._tasks:", "if ordinal < 0:"),
        ),
    ),
    Bug(
        name="fsync left out",
        patches=(
            (
                "skyrl_train.system.files.append_log:AppendLog._write",
                "bring_to_disk(self._file.fileno(), self.path)",
                "pass",
            ),
        ),
    ),
    Bug(
        name="a rename before its fsync",
        patches=(
            ("skyrl_train.system.files.files:write_atomically", "bring_to_disk(file.fileno(), path)\n", "pass\n"),
        ),
    ),
    Bug(
        name="a frontier that skips",  # NeMo-RL 3599: a restart went on behind what was still in flight
        patches=(
            (f"{_ADMISSION}:ConsumedPrompts.plus", "while watermark in beyond:", "while beyond:"),
            (f"{_ADMISSION}:ConsumedPrompts.plus", "beyond.remove(watermark)", "beyond.discard(watermark)"),
        ),
    ),
    Bug(
        name="an eviction race of adapters",
        patches=((_ADAPTERS, " if not self._in_use.get(each)]", "]"),),
    ),
    Bug(
        name="a timeout that leaks its task",
        patches=(
            (
                "skyrl_train.rollout.agent_loop:ask_engine",
                "asyncio.wait_for(engine.generate(request), timeout_s)",
                "asyncio.wait_for(asyncio.shield(engine.generate(request)), timeout_s)",
            ),
        ),
    ),
    Bug(
        name="retries that run twice",
        patches=(
            (
                _ACCEPT,
                "await self._log.on_disk(promise.accepted)\n            return ",
                "await self._log.on_disk(promise.accepted)\n            if verb == 'sample' and not promise.done.is_set():\n"
                "                if hasattr(self, '_request'):\n"
                "                    self._begin_sample(self._request(request_id))\n"
                "                else:\n                    return request_id, self.request(request_id)\n"
                "            return ",
            ),
        ),
    ),
    Bug(
        name="a stop between checkpoint and record",
        patches=(
            (f"{_PPO}._finish_step", "self.loop.record(", "record = lambda: self.loop.record("),
            (
                f"{_PPO}._finish_step",
                "self.loop.conclude(step, self.state)",
                "self.loop.conclude(step, self.state)\n        record()",
            ),
        ),
    ),
    Bug(
        name="a clock used for order",
        patches=(
            (
                f"{_FOLDER}:_candidates",
                "return [folders[step] for step in sorted(folders, key=lambda step: (step > named, -step))]",
                "return sorted(folders.values(), key=lambda each: -each.stat().st_mtime)",
            ),
        ),
    ),
    Bug(
        name="a queue without bound",
        patches=(
            (
                f"{_ADMISSION}:Admission.start",
                "min(self.version + 1 + trainer.max_staleness, self.total_batches)",
                "self.total_batches",
            ),
        ),
    ),
)
"""Those that were asked for."""

PUBLIC = (
    Bug(
        name="an evaluation near the last step is dropped",  # prime-rl 2912: its rollouts were not waited for at the end
        patches=(
            (
                "skyrl_train.trainers.loop:TrainingLoop.evaluate_where_due",
                "self.is_last(step) or is_due(",
                "not self.is_last(step) and is_due(",
            ),
        ),
    ),
    Bug(
        name="a message that came while its wait was given up is forgotten",  # prime-rl 1801, verifiers 921
        patches=(
            ("skyrl_train.serve.scheduler:Scheduler._take_turns", "self._wake.clear()\n", "pass\n"),
            (
                "skyrl_train.serve.scheduler:Scheduler._take_turns",
                "self._take_lost()\n",
                "self._take_lost()\n            self._wake.clear()\n",
            ),
        ),
    ),
    Bug(
        name="a restart at the end of an epoch skips the next one",  # verl 7401: it went on with an exhausted iterator
        patches=(
            (
                f"{_STREAM}._begin",
                "self._journal.resume(version, settled)",
                "self._journal.resume(version, settled)\n"
                "        if version and not settled.beyond:\n"
                "            begun = max([settled.watermark, *(1 + ordinal for ordinal in self._journal.started)])\n"
                "            self._admission._next = begun + self._trainer.train_batch_size",
            ),
        ),
    ),
    Bug(
        name="the place in the data runs ahead of what is trained on",  # NeMo-RL 3599: what was in flight was skipped
        patches=(
            (
                f"{_STREAM}._batch",
                "settled = self._rules.settled\n",
                "first = max([self._rules.settled.watermark, *(1 + ordinal for ordinal in self._tasks)])\n"
                "        settled = ConsumedPrompts(watermark=first)\n",
            ),
        ),
    ),
)
"""The like of public failures, beside "a frontier that skips" (NeMo-RL 3599) above."""

FURTHER = (
    Bug(
        name="stale rollouts are trained on",  # prime-rl 491: the trainer went ahead of what makes its rollouts
        patches=((f"{_ADMISSION}:Admission._is_on_time", "due = Counter(", "return True\n        due = Counter("),),
    ),
    Bug(
        name="a reservation that is not given back",  # NeMo-RL 2651: who failed kept the place of who comes next
        patches=(
            (_HOSTS, "async with self._slots:", "await self._slots.acquire()\n        if True:"),
            (
                _HOSTS,
                "append(calls)\n            return",
                "append(calls)\n            self._slots.release()\n            return",
            ),
        ),
    ),
    Bug(
        name="a batch trained on before it is on the disk",
        patches=(
            (
                f"{_STREAM}._take",
                "await self._journal.keep_batch(version, closed)",
                "asyncio.ensure_future(self._journal.keep_batch(version, closed))",
            ),
        ),
    ),
    Bug(
        name="a journal compacted behind a checkpoint that is being written",
        patches=(
            (
                f"{_FOLDER}:oldest_step",
                "return None if oldest is None or oldest > named else oldest",
                "return max((step_of(each.name.removeprefix('.tmp-')) for each in root.iterdir()), default=None)",
            ),
        ),
    ),
    Bug(
        name="a request promised before it is on the disk",
        patches=((_ACCEPT, "promise.place = await self._log.on_disk(written)", "promise.place = 0"),),
    ),
    Bug(
        name="a restart that executes once more what its anchor has",
        patches=(("skyrl_train.serve.scheduler:_behind", "and seq > anchor", "and seq >= anchor"),),
    ),
)


OURS = (
    Bug(
        name="a full disk at an anchor that ends all turns in silence",
        patches=(
            ("skyrl_train.serve.models:Models.save", "except OSError as error", "except ZeroDivisionError as error"),
            ("skyrl_train.serve.scheduler:Scheduler.start", "self._turns.add_done_callback(self._tell_end)", "pass"),
        ),
    ),
    Bug(
        name="an adapter that a cancelled sample leaves behind",
        patches=(("skyrl_train.serve.models:Models.adapter_for", "await asyncio.shield(taking)", "await taking"),),
    ),
    Bug(
        name="a folder is lost with what was synced in it",
        patches=(
            ("skyrl_train.system.files.files:make_folder", "for each in missing or [folder]:", "for each in ():"),
        ),
    ),
    Bug(
        name="a configuration that is half written",
        patches=(
            (
                "skyrl_train.runs.cli.composition:write_yaml",
                "write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(dict(content))).encode())",
                "path.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(content))))",
            ),
        ),
    ),
    Bug(
        name="a run that begins again forgets first which run it is",
        patches=(
            (
                "skyrl_train.telemetry.run_folder:RunFolder.discard",
                "self.memory_file, self.config_file, self.plan_file)",
                "self.memory_file)",
            ),
        ),
    ),
    Bug(
        name="a checkpoint whose name is lost with the power",
        patches=(
            (
                "skyrl_train.trainers.checkpoints.store:CheckpointStore.clean",
                "sync_folder(self._root)",
                "pass",
            ),
        ),
    ),
    Bug(
        name="a full disk that ends a run by a traceback",
        patches=(
            (
                "skyrl_train.trainers.checkpoints.store:CheckpointStore._writer",
                "with _on_this_disk(path):",
                "if True:",
            ),
        ),
    ),
    Bug(
        name="a run whose end is lost with the power",
        patches=(
            (
                "skyrl_train.telemetry.run_folder:RunFolder.locked",
                "bring_to_disk(folder, self.root)",
                "pass",
            ),
        ),
    ),
    Bug(
        name="a fetched checkpoint that is not on the disk",
        patches=(
            (
                "skyrl_train.trainers.checkpoints.store:ObjectStore.download",
                "bring_to_disk(stream.fileno(), path)",
                "pass",
            ),
        ),
    ),
    Bug(
        name="a fetched record that is not on the disk",
        patches=(
            (
                "skyrl_train.trainers.resume:_prepare",
                "write_atomically(folder.root / name, record[name])",
                "(folder.root / name).write_bytes(record[name])",
            ),
        ),
    ),
)
"""Those that the product had until a world broke a law."""

ALL = (*LISTED, *PUBLIC, *FURTHER, *OURS)


@contextlib.contextmanager
def planted(bug: Bug | None) -> Iterator[None]:
    """Have the product run with a bug. Raises ValueError where its text is not there any more."""
    with contextlib.ExitStack() as stack:
        patches = bug.patches if bug is not None else ()
        for where in dict.fromkeys(where for where, _, _ in patches):
            edits = [(old, new) for there, old, new in patches if there == where]
            stack.enter_context(_patched(where, edits, bug.name if bug is not None else ""))
        yield


@contextlib.contextmanager
def _patched(where: str, edits: Sequence[tuple[str, str]], name_of_bug: str) -> Iterator[None]:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(module_name)
    *classes, name = path.split(".")
    owner: Any = module
    for each in classes:
        owner = getattr(owner, each)
    before = vars(owner)[name]
    source = inspect.getsource(before)
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{where} has {source.count(old)} times: {old}")
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    whole = f"if True:\n{source}" if source[0] == " " else source
    exec(compile(whole, f"<{name_of_bug}>", "exec", __future__.annotations.compiler_flag), module.__dict__, made)
    changed = [(owner, name)]
    if owner is module:  # others have it by its name
        changed += [
            (other, name)
            for key, other in list(sys.modules.items())
            if key.startswith("skyrl_train") and vars(other).get(name) is before and other is not module
        ]
    for each, attribute in changed:
        setattr(each, attribute, made[name])
    try:
        yield
    finally:
        for each, attribute in changed:
            setattr(each, attribute, before)
