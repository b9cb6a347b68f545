"""What a file, an environment, an engine or a server gives is read as data: nothing of it is ever run.

The rules read the source of the package, the scripts and the examples. Ray's own transport between the processes of one
run pickles, as does torch.distributed where ranks of one run exchange Python objects: both are named below.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.source_calls import REPOSITORY, Call, Exceptions, Rule, calls_in, calls_of, offences

_PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
_RUNNERS = ("eval", "exec", "compile", "execfile", "__import__")
_OF_RANKS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list")


def unpickles(call: Call) -> bool:
    """`pickle.loads` and whatever reads pickles without saying so: `torch.load`, numpy's object arrays, distributed
    checkpoints' metadata, pipes and pools of multiprocessing."""
    module = call.target.partition(".")[0]
    torch_load = call.target == "torch.load" and call.keyword("weights_only") != "True"
    numpy_load = call.has_keyword("allow_pickle") and call.keyword("allow_pickle") != "False"
    readers = call.name in (
        "FileSystemReader",
        "Unpickler",
        "ProcessPoolExecutor",
        "Pipe",
        "SimpleQueue",
        "read_pickle",
    )
    is_threads_queue = call.target in ("queue.SimpleQueue",)
    pickles = module in _PICKLES and not call.name.endswith("Error")
    return pickles or torch_load or numpy_load or (readers and not is_threads_queue)


def runs_text(call: Call) -> bool:
    """`eval`, `exec`, a shell, a YAML loader that constructs objects."""
    shell = call.keyword("shell") not in (None, "False")
    systems = call.target in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")
    yaml = call.target in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all")
    return call.target in _RUNNERS or shell or systems or (yaml and "SafeLoader" not in call.text)


def exchanges_objects(call: Call) -> bool:
    """Collectives of Python objects, which travel as pickles."""
    return call.name in _OF_RANKS


def trusts_remote_code(call: Call) -> bool:
    """Code that lies beside a model's weights, whatever the user's `model.trust_remote_code` says."""
    return call.keyword("trust_remote_code") == "True"


RULES: tuple[Rule, ...] = (unpickles, runs_text, exchanges_objects, trusts_remote_code)
_RANKS = "between the ranks of one run, whose group nobody else can join"
EXCEPTIONS: Exceptions = {
    ("skyrl_train/distributed/collectives.py", "dist.broadcast_object_list"): _RANKS,
    ("skyrl_train/distributed/collectives.py", "dist.all_gather_object"): _RANKS,
    ("skyrl_train/distributed/fsdp.py", "dist.broadcast_object_list"): _RANKS,
    ("skyrl_train/system/sandbox/child.py", "exec"): "what a sandbox is for",
    ("skyrl_train/system/sandbox/child.py", "compile"): "what a sandbox is for",
    ("scripts/preset_layouts.py", "dist.all_gather_object"): _RANKS,
    ("scripts/bench/long_rows.py", "torch.load"): "of what the script's own processes wrote a moment ago",
    ("scripts/bench/weight_driver.py", "pickle.dumps"): "what a call would weigh",
    ("scripts/bench/weight_driver.py", "pickle.loads"): "of what the script itself pickled a moment ago",
    ("scripts/bench/update_ranks.py", "torch.load"): "of what the script's own processes wrote a moment ago",
}


@pytest.mark.slow
def test_nothing_of_what_is_read_is_run() -> None:
    assert offences(calls_in("skyrl_train", "scripts", "examples"), RULES, EXCEPTIONS) == []


@pytest.mark.slow
def test_no_module_imports_what_unpickles() -> None:
    found = set()
    for path in sorted((REPOSITORY / "skyrl_train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] in _PICKLES for name in names):
                found.add(path.relative_to(REPOSITORY).as_posix())
    assert not found


@pytest.mark.parametrize(
    ("rule", "against", "within"),
    [
        (unpickles, "pickle.loads(content)", "json.loads(content)"),
        (unpickles, "torch.load(path)", "torch.load(path, weights_only=True)"),
        (unpickles, "np.load(path, allow_pickle=True)", "np.load(path)"),
        (unpickles, "FileSystemReader(folder).read_metadata()", "load_file(folder)"),
        (unpickles, "multiprocessing.SimpleQueue()", "queue.SimpleQueue()"),
        (runs_text, "eval(text)", "model.eval()"),
        (runs_text, "subprocess.run(text, shell=True)", "subprocess.run(words)"),
        (runs_text, "yaml.load(text)", "yaml.safe_load(text)"),
        (exchanges_objects, "dist.broadcast_object_list(values)", "dist.broadcast(tensor)"),
        (trusts_remote_code, "load(path, trust_remote_code=True)", "load(path, trust_remote_code=False)"),
    ],
)
def test_the_rules_tell_data_from_code(rule: Rule, against: str, within: str) -> None:
    assert any(map(rule, calls_of(against, "x.py")))
    assert not any(map(rule, calls_of(within, "x.py")))


_EVERYWHERE = re.compile(r"0\.0\.0\.0|bind\(\([\"']{2}|host[\w.-]*[\"']?\s*[:=]\s*[\"'](?:::|\*)?[\"']")
_LISTENING = {
    "skyrl_train/endpoints.py": "a port is sought, not listened on: it must be free on every address",
    "scripts/launch/kuberay.yaml": "jobs are submitted over the pods' network, with a token",
}


def test_no_listener_is_open_to_other_machines_by_default() -> None:
    folders = ("skyrl_train", "conf", "scripts", "examples", "docker")
    kinds = (".py", ".sh", ".yaml", ".yml", ".Dockerfile", "")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix in kinds]
    found = {
        path.relative_to(REPOSITORY).as_posix()
        for path in files
        if path.is_file() and _EVERYWHERE.search(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert found == set(_LISTENING)
