"""Bugs planted in the reference server, each of which one check must catch while unrelated ones still pass.

A bug is one patch: pairs of texts, each of which occurs once in a file of the server. Those of a public thread are such as
another server really had. `python planted.py` runs each against the check that must catch it and against `UNRELATED`;
`python planted.py --all` against the whole suite (half a minute each), which is how the table in README.md was made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SERVER = ("reference.py", "softmax.py", "wire.py")
# One of each group, and quick. A bug names those that are related to it.
UNRELATED = [
    "wire.capabilities_name_a_model",
    "wire.ragged_batches",
    "idempotence.result_is_read_twice",
    "accumulation.training_moves",
    "optimizer.rate_of_zero",
    "losses.cross_entropy_value",
    "sampling.greedy_is_the_same_twice",
    "versions.base_stays",
    "tenants.model_of_another[info]",
    "checkpoints.saved_is_listed[training]",
    "liveness.heartbeat",
    "limits.no_datums",
]


@dataclass(frozen=True)
class Bug:
    """One planted bug."""

    name: str
    says: str
    caught: str
    """The check that must fail."""
    patch: tuple[tuple[str, str], ...]
    thread: str = ""
    """The public thread of a server that had it."""
    related: tuple[str, ...] = ()
    """Checks of `UNRELATED` that may fail, too."""


def bug(name: str, says: str, caught: str, *patch: str, thread: str = "", related: tuple[str, ...] = ()) -> Bug:
    return Bug(name, says, caught, tuple(zip(patch[::2], patch[1::2])), thread, related)


BUGS = [
    bug(
        "no_client_config",
        "the route that SDKs since 0.18 ask first does not exist",
        "wire.client_config[0.18.0]",
        "def now_client_config",
        "def later_client_config",
        thread="NovaSky-AI/SkyRL#1552",
    ),
    bug(
        "json_results",
        "results are JSON though the client accepts protobuf alone",
        "wire.pass_answers_in_protobuf",
        'if PROTOBUF in headers.get("accept", "") and "loss_fn_outputs" in future.result:',
        'if "protobuf only" in headers.get("accept", "") and "loss_fn_outputs" in future.result:',
        thread="NovaSky-AI/SkyRL#2021",
    ),
    bug(
        "optimizer_always_restored",
        "loading restores the optimizer though it was told not to",
        "optimizer.load_without_optimizer[false]",
        'if given.get("optimizer", False):',
        "if True:",
        thread="NovaSky-AI/SkyRL#1993",
    ),
    bug(
        "optimizer_restored_by_default",
        "loading restores the optimizer where nothing was said of it",
        "optimizer.load_without_optimizer[nothing]",
        'if given.get("optimizer", False):',
        'if given.get("optimizer", True):',
        thread="NovaSky-AI/SkyRL#2071",
    ),
    bug(
        "retries_run_twice",
        "a request that is sent again runs again",
        "idempotence.pass_sent_twice_adds_once",
        "if key not in self.promises:",
        "if True:",
        "            require(isinstance(seq, int) and seq >= model.next_seq",
        "            if isinstance(seq, int) and 0 < seq < model.next_seq:\n"
        "                self.future(name, owner, lambda _: run(model, given))()\n"
        "            require(isinstance(seq, int)",
        thread="NovaSky-AI/SkyRL#2035",
    ),
    bug(
        "forward_only_trains",
        "forward_only, by which SDKs since 0.25 ask for a forward pass, is not read",
        "accumulation.forward_adds_nothing",
        'given["forward_backward_input"], not given.get("forward_only"))',
        'given["forward_backward_input"], True)',
        thread="agentscope-ai/TuFT#145",
    ),
    bug(
        "binary_body_is_500",
        "a binary body that cannot be read is the server's own error, which the SDK retries",
        "wire.truncated_protobuf[0.6]",
        'raise Refused(400, f"the body cannot be read: {error}")',
        'raise Refused(500, f"the body cannot be read: {error}")',
        thread="gke-labs/open-rl#245",
    ),
    bug(
        "too_few_sequence_ids",
        "the promise of samples does not name each sequence: the SDK asserts that, at step 0 of every recipe",
        "wire.sample_sequence_ids",
        'f"{name}-{index}" for index in range(count)',
        'f"{name}-{index}" for index in range(1)',
        thread="gke-labs/open-rl#251",
    ),
    bug(
        "old_loss_config",
        "the newer field of a loss's settings is not read",
        "wire.loss_config_fields[loss_fn_config_v2]",
        'getattr(message, "loss_fn_config_v2", {}).items()',
        "()",
        thread="GMISWE/tinker-cloud#59",
    ),
    bug(
        "optimizer_never_restored",
        "loading with the optimizer does not restore it",
        "optimizer.load_with_optimizer",
        "            model.moments = kept.moments\n",
        "            model.moments = (zeros(), zeros(), 0)\n",
        thread="thinking-machines-lab/tinker-feedback#127",
    ),
    bug(
        "misaligned_logprobs",
        "returned log-probabilities are shifted against their targets",
        "losses.cross_entropy_value",
        '"data": logprobs.tolist()',
        '"data": np.roll(logprobs, 1).tolist()',
        thread="NovaSky-AI/SkyRL#1304",
        related=("losses.cross_entropy_value",),
    ),
    bug(
        "samples_collide",
        "samples of two samplers with the same number are one request",
        "idempotence.numbers_of_two_samplers",
        "{given['sampling_session_id']} sample {given['seq_id']}",
        "{owner} sample {given['seq_id']}",
        thread="NovaSky-AI/SkyRL#2094",
        related=("sampling.greedy_is_the_same_twice", "versions.base_stays"),
    ),
    bug(
        "mean_over_tokens",
        "the gradient is a mean over a datum's tokens, not a sum",
        "accumulation.gradient_is_a_sum_over_tokens",
        "* slopes[:, None])",
        "* slopes[:, None] / max(1, len(tokens)))",
    ),
    bug(
        "last_chunk_wins",
        "a chunk's gradient replaces that of the chunk before",
        "accumulation.chunks_add_up_to_one[2]",
        "model.gradient = model.gradient + gradient",
        "model.gradient = gradient",
    ),
    bug(
        "gradient_leaks",
        "a part of the gradient is left after its step",
        "accumulation.step_clears_the_gradient",
        "    model.gradient = zeros()\n",
        "    model.gradient = 0.1 * model.gradient\n",
    ),
    bug(
        "no_bias_correction",
        "AdamW's first moment is not corrected for its bias",
        "optimizer.bias_correction[0.5-0.5]",
        "(mean / (1 - beta1**steps))",
        "mean",
    ),
    bug(
        "eps_inside_the_root",
        "eps is added under the root",
        "optimizer.eps_outside_the_root",
        "(np.sqrt(square / (1 - beta2**steps)) + eps)",
        "np.sqrt(square / (1 - beta2**steps) + eps)",
    ),
    bug(
        "coupled_decay",
        "weight decay is a part of the gradient (Adam with L2)",
        "optimizer.weight_decay_to_the_base",
        "model.weights * (1 - lr * decay) - lr * update",
        "model.weights - lr * update",
        "gradient, norm = model.gradient, float",
        "gradient, norm = model.gradient + decay * model.weights, float",
    ),
    bug(
        "clipped_by_element",
        "each element of the gradient is clipped, not its norm",
        "optimizer.clip_keeps_the_direction",
        "gradient = gradient * (clip / norm)",
        "gradient = np.clip(gradient, -clip, clip)",
    ),
    bug(
        "other_default",
        "the default of beta2 is torch's, not the SDK's",
        "optimizer.defaults[beta2]",
        '"beta2": 0.95',
        '"beta2": 0.999',
    ),
    bug(
        "ppo_without_the_minimum",
        "ppo stops every token beyond the thresholds, on both sides of the advantage",
        "losses.ppo_edges[0.5--1.0-True]",
        "free = ratio * advantages <= clipped * advantages",
        "free = ratio == clipped",
    ),
    bug(
        "ratio_upside_down",
        "the probability ratio is the old over the new",
        "losses.value[importance_sampling-0]",
        "np.exp(logprobs - sampled)",
        "np.exp(sampled - logprobs)",
    ),
    bug(
        "thresholds_are_distances",
        "a threshold of ppo is taken for a distance from 1",
        "losses.thresholds_are_ratios[ppo]",
        'config.get("clip_high_threshold", 1.2)',
        '1 + config.get("clip_high_threshold", 0.2)',
    ),
    bug(
        "cispo_stops",
        "cispo gives a token beyond the thresholds no gradient, as ppo does",
        "losses.cispo_never_stops[0.5]",
        "return -clipped * logprobs * advantages, -clipped * advantages",
        "return -clipped * logprobs * advantages, np.where(ratio == clipped, -clipped * advantages, 0.0)",
    ),
    bug(
        "dro_without_its_half",
        "the gradient of dro's square is half of what it is",
        "losses.gradient[dro-1]",
        "-(advantages - beta * distance)",
        "-(advantages - 0.5 * beta * distance)",
    ),
    bug(
        "greedy_draws",
        "temperature 0 is taken for the default",
        "sampling.greedy_takes_the_best",
        "        return int(order[0])\n",
        "        temperature = 1\n",
        related=("sampling.greedy_is_the_same_twice",),
    ),
    bug(
        "one_seed_for_all",
        "the samples of one request are drawn by the same numbers",
        "sampling.samples_of_a_request_differ",
        "default_rng([seed, index])",
        "default_rng([seed, 0])",
    ),
    bug(
        "stop_token_is_cut",
        "the stop token is not among the tokens",
        "sampling.stop_token",
        '"tokens": tokens, "logprobs": logprobs})',
        '"tokens": tokens[: len(tokens) - (reason == "stop")], "logprobs": logprobs[: len(tokens) - (reason == "stop")]})',
    ),
    bug(
        "stop_strings_are_passed_over",
        "strings among the stops end nothing",
        "sampling.stop_string[True]",
        "return tokens[-1] in ends or any(text in written for text in texts)",
        "return tokens[-1] in ends",
    ),
    bug(
        "stop_strings_within_a_token",
        "a stop string is looked for in the newest token alone",
        "sampling.stop_string_across_tokens",
        "written = text_of(tokens)",
        "written = text_of(tokens[-1:])",
    ),
    bug(
        "images_are_fetched",
        "where an image is said to lie is gone to before the image is refused",
        "limits.location_of_an_image[an address of the server's own network]",
        '    chunks = model_input["chunks"]\n',
        '    import urllib.request\n\n    chunks = model_input["chunks"]\n'
        "    for chunk in chunks:\n"
        '        if str(chunk.get("location", "")).startswith("http:"):\n'
        "            try:\n"
        '                urllib.request.urlopen(chunk["location"], timeout=0.3)\n'
        "            except OSError:\n"
        "                pass\n",
    ),
    bug(
        "first_prompt_token_is_scored",
        "the first prompt token has a log-probability of 0 instead of none",
        "sampling.prompt_logprobs",
        'answer["prompt_logprobs"] = [None] * first',
        'answer["prompt_logprobs"] = [0.0] * first',
    ),
    bug(
        "tempered_logprobs",
        "a sampled token's log-probability is not the model's",
        "sampling.logprobs_equal_forward",
        "logprobs = [float(each[token]) for each, token in zip(scores, tokens)]",
        "logprobs = [float(each[token]) - 1e-3 for each, token in zip(scores, tokens)]",
    ),
    bug(
        "snapshot_moves",
        "an unnamed snapshot follows its model",
        "versions.snapshot_stays[False]",
        'Owned(model.owner, {"model_path": None}, weights=model.weights)',
        "model",
    ),
    bug(
        "no_owner",
        "whoever knows a name has what it names",
        "tenants.model_of_another[pass]",
        "if name not in table or table[name].owner != owner:",
        "if name not in table:",
        related=("tenants.model_of_another[info]",),
    ),
    bug(
        "deleted_is_kept",
        "a deleted checkpoint is still there",
        "checkpoints.deleted_is_gone[training]",
        "                    del self.checkpoints[path]\n",
        "",
    ),
    bug(
        "order_of_arrival",
        "requests run in the order in which they arrive",
        "idempotence.later_request_waits",
        "            while model.next_seq in model.waiting:\n"
        "                model.waiting.pop(model.next_seq)()\n"
        "                model.next_seq += 1\n",
        "            model.waiting.pop(seq)()\n            model.next_seq = max(model.next_seq, seq + 1)\n",
        "seq >= model.next_seq, f",
        "seq >= 0, f",
    ),
    bug(
        "failure_blocks",
        "a request that failed keeps its turn, so that those after it wait for ever",
        "idempotence.failed_request_gives_way",
        "                model.next_seq += 1\n",
        '                model.next_seq += "error" not in (self.futures[name].result or {})\n',
    ),
    bug(
        "forgets_on_restart",
        "what models were asked to do is forgotten when the server is killed",
        "idempotence.restart_keeps_weights",
        "            if self.journal is not None:\n",
        '            if self.journal is not None and (run is None or verb == "create_model"):\n',
    ),
    bug(
        "conflict_is_retried",
        "a number that was used is refused by 409, on which the SDK sends the request again for five minutes",
        "idempotence.number_used_for_another_request[pass]",
        'raise Refused(422, f"{key.split()[1:]}',
        'raise Refused(409, f"{key.split()[1:]}',
    ),
    bug(
        "silent_408",
        "an unfinished request is answered by 408 without a body",
        "liveness.poll_says_try_again",
        'return 408, {"type": "try_again", "request_id": given["request_id"], "queue_state": "active"}',
        "return 408, {}",
    ),
    bug(
        "samples_hold_the_server",
        "nothing else is answered while samples are drawn",
        "liveness.training_beside_slow_samples",
        "threading.Thread(target=finish, daemon=True).start()",
        "finish()",
    ),
    bug(
        "noise_above_the_cap",
        "log-probabilities depend on how many datums are sent together",
        "accumulation.noise[forward]",
        "logprobs = every[np.arange(len(tokens)), targets]",
        'logprobs = every[np.arange(len(tokens)), targets] - 1e-4 * len(given["data"])',
        related=("wire.ragged_batches",),
    ),
    bug(
        "user_errors_are_the_servers",
        "a wrong request fails in the category 'server'",
        "losses.unknown_loss[no_such_loss]",
        '"category": "user"',
        '"category": "server"',
        related=("limits.no_datums",),
    ),
    bug(
        "nan_is_trained",
        "numbers that are not finite are trained on",
        "limits.bad_datum[a weight is NaN]",
        'require(bool(np.isfinite(fields[-1]).all()), f"{name} holds a number that is not finite")',
        "fields[-1] = fields[-1] * 1.0",
    ),
    bug(
        "any_name",
        "the name of a checkpoint may be a path",
        "limits.bad_name[save_weights-../escape]",
        "        require(fits, f",
        "        require(True or fits, f",
    ),
    bug(
        "any_optimizer",
        "an optimizer that is not served is replaced by AdamW",
        "limits.unknown_optimizer",
        '        require("adam_params" in given, "only adam_params are served: no other optimizer")\n',
        '        given = {"adam_params": given.get("adam_params") or {}}\n',
    ),
]


def node(check: str) -> str:
    """The pytest id of a check by its name in the report."""
    group, _, name = check.partition(".")
    return f"{HERE / f'check_{group}.py'}::check_{name}"


def patched(found: Bug, folder: Path) -> None:
    """Write the server with the bug into a folder. Raises ValueError where the patch does not fit it."""
    for file in SERVER:
        shutil.copy(HERE / file, folder)
    for old, new in found.patch:
        holders = [file for file in SERVER if (HERE / file).read_text().count(old) == 1]
        if len(holders) != 1:
            raise ValueError(f"{found.name}: {old!r} must occur once in one file of the server, not in {holders}")
        path = folder / holders[0]
        path.write_text(path.read_text().replace(old, new))


def verdicts(found: Bug, whole: bool) -> dict[str, str]:
    """The verdict of each check against the server with the bug."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        patched(found, folder)
        checks = [str(HERE)] if whole else [node(check) for check in dict.fromkeys([found.caught, *UNRELATED])]
        options = [
            "--reference",
            str(folder / "reference.py"),
            "--report",
            str(folder / "report"),
            "-q",
            "-c",
            str(HERE / "pytest.ini"),
        ]
        log = folder / "log"
        process = multiprocessing.get_context("fork").Process(target=run_pytest, args=([*checks, *options], log))
        process.start()
        process.join()
        if process.exitcode not in (0, 1):
            raise RuntimeError(f"{found.name}: exit code {process.exitcode}\n{log.read_text()}")
        report = json.loads((folder / "report.json").read_text())
    return {each["check"]: each["verdict"] for each in report["checks"]}


def run_pytest(arguments: list[str], log: Path) -> None:
    """Run pytest in this process, a fork of one that has imported what is slow to import, and end it."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        os._exit(code)


def judged(found: Bug, whole: bool) -> tuple[Bug, list[str], list[str]]:
    """A bug, the checks that failed, and what is wrong with that."""
    seen = verdicts(found, whole)
    failed = [check for check, verdict in seen.items() if verdict == "fail"]
    wrong = [f"{found.caught} did not catch it"] if seen.get(found.caught) != "fail" else []
    spared = [check for check in UNRELATED if check != found.caught and check not in found.related]
    wrong += [f"{check}: {seen.get(check, 'not run')}" for check in spared if seen.get(check) != "pass"]
    if whole and len(failed) > len(seen) / 3:
        wrong.append(f"{len(failed)} of {len(seen)} checks fail: the bug is not one")
    return found, failed, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the checks against servers with planted bugs.")
    parser.add_argument("names", nargs="*", help="bugs to plant; all by default")
    parser.add_argument("--all", action="store_true", help="the whole suite against each")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    os.environ["CONFORMANCE_DEADLINE_S"] = "4"  # some bugs make a result wait for ever
    sys.path.insert(0, str(HERE))
    import check_sdk  # noqa: F401  (once here, and not in each fork)

    chosen = [each for each in BUGS if not given.names or each.name in given.names]
    print("| bug | what is wrong | thread | caught by | checks that fail |\n|---|---|---|---|---|")
    bad = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for found, failed, wrong in pool.map(lambda each: judged(each, given.all), chosen):
            print(f"| {found.name} | {found.says} | {found.thread} | `{found.caught}` | {len(failed)} |", flush=True)
            for line in wrong:
                bad += 1
                print(f"{found.name}: {line}", file=sys.stderr, flush=True)
    print(f"{len(chosen)} bugs, {bad} complaints", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
