"""One task: a small repository with a bug in it, mini-swe-agent's command `mini`, and the repository's own test afterwards.

python repair.py MINI TASK_FILE REPORT_FILE FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

mini, task_file, report_file, folder = map(Path, sys.argv[1:])
task = json.loads(task_file.read_text())
repository = folder / "repository"
repository.mkdir()
for name, text in task["files"].items():
    (repository / name).write_text(text)
settings = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
words = [mini, "--yolo", "--exit-immediately", "--model", "openai/policy", "--task", task["prompt"][-1]["content"]]
words += ["--config", Path(__file__).with_name("mini.yaml"), "--output", folder / "run.json"]
subprocess.run(words, cwd=repository, env={**os.environ, **settings}, timeout=200, check=True)
test = subprocess.run([sys.executable, "test.py"], cwd=repository, timeout=20, check=False)
report_file.write_text(json.dumps({"reward": float(test.returncode == 0)}))
