"""A language model learns to use a calculator: demonstrations first, then GRPO.

    python examples/tools.py [--seed 0] [--warm-up-steps 180] [--steps 15] [--output runs/tools]

The task is sums and products of two digits, `7*8=?`. Of the demonstrations, half call the calculator and give its
result; the others guess, and are wrong. So the model that they make mostly guesses, too. GRPO rewards right answers alone,
and finds that calling the tool is what gives them.

Three things here are what a task of your own would have: a tool (`calculator`), an environment that scores the answer
(`Sum`), and a chat template that shows tools, since that of the bundled model does not. `python` is a second tool, which
runs programs in a process with limits: `environment.tools=[tools:calculator,tools:python]`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import operator
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: A sum, difference or product of whole numbers.
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("only whole numbers, +, - and *")


_PROGRAM = """\
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
exec(compile(sys.stdin.read(), "program.py", "exec"), {"__name__": "__main__"})
"""


def python(code: str) -> str:
    """Runs a Python program and tells what it prints.

    It has two seconds of computing, 512 MB, an empty folder and none of this process's environment variables. Limits keep
    mistakes away; they are no protection against malice, for which a container is the place.

    Args:
        code: The program.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(code, timeout=10)
        except subprocess.TimeoutExpired:
            raise TimeoutError("the program did not end within 10 s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it has started, too
            process.wait()
    if process.returncode:
        raise RuntimeError(f"the program failed: {printed.strip()[-300:] or f'status {process.returncode}'}")
    return printed


class Sum:
    """The environment: 1 for the right number after `####`."""

    def __init__(self, env_config, extras):  # noqa: ARG002 - part of the protocol
        self.answer = str(extras["answer"])
        self.solved = 0.0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.solved = float(action.rpartition("####")[2].strip() == self.answer)
        return {"observations": [], "reward": self.solved, "done": True, "metadata": {}}

    def close(self):
        pass

    def get_metrics(self):
        return {"solved": self.solved}


TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- for tool in tools -%}{{- tool.function.name + ': ' + tool.function.description -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The format of Hermes and Qwen, with one line a tool in place of its schema: the model is small."""


def write_model(folder: Path) -> None:
    """The bundled model, with a chat template that shows tools."""
    shutil.copytree(Path(str(files("skyrl_train.data.assets"))) / "tiny_qwen2", folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_data(folder: Path, seed: int) -> None:
    """Demonstrations for the warm start, and prompts for reinforcement learning."""
    rng = random.Random(seed)
    schema = {"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": {}}}
    demonstrations, prompts = [], []
    for _ in range(4000):
        expression = f"{rng.randint(2, 9)}{rng.choice('+*')}{rng.randint(2, 9)}"
        answer = calculator(expression)
        question = {"role": "user", "content": f"{expression}=?"}
        prompts.append({"prompt": [question], "answer": answer})
        guess = int(answer) + rng.choice([-3, -2, -1, 1, 2, 3])
        messages = [question, {"role": "assistant", "content": f"#### {guess}"}]
        if rng.random() < 0.5:
            call = {"name": "calculator", "arguments": {"expression": expression}}
            messages = [
                question,
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": answer},
                {"role": "assistant", "content": f"#### {answer}"},
            ]
        demonstrations.append({"messages": messages, "tools": [schema]})
    for name, rows in (("demonstrations", demonstrations), ("train", prompts[:2000]), ("validation", prompts[-64:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(module: str, *settings: str) -> None:
    """One command line, with this folder where Python finds it."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-m", module, *settings], check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up-steps", type=int, default=180)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("runs/tools"))
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_data(folder, arguments.seed)
    run(
        "skyrl_train.main_sft",
        f"output_dir={folder / 'warm_up'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'demonstrations.jsonl'}]",
        "data.validation=[]",
        "data.max_length=256",
        "data.loss_on=all",
        f"trainer.num_steps={arguments.warm_up_steps}",
        "trainer.batch_size=32",
        "trainer.layout=packed",
        "trainer.optimizer.lr=2e-3",
        "trainer.optimizer.warmup_steps=10",
        "trainer.optimizer.schedule=cosine",
        "trainer.ckpt_interval=0",
    )
    run(
        "skyrl_train.main",
        f"output_dir={folder / 'rl'}",
        f"seed={arguments.seed}",
        f"model.path={folder / 'warm_up' / 'export'}",
        f"data.train=[{folder / 'train.jsonl'}]",
        f"data.validation=[{folder / 'validation.jsonl'}]",
        "environment.env_class=tools:Sum",
        "environment.tools=[tools:calculator]",
        "environment.num_workers=2",
        "generator.max_turns=3",
        "generator.max_context_length=320",
        "generator.sampling.max_generate_length=96",
        "generator.n_samples_per_prompt=8",
        "generator.sampling.temperature=0.8",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        f"trainer.total_steps={arguments.steps}",
        "trainer.policy.optimizer.lr=1e-4",
        "trainer.eval_interval=0",
        "trainer.ckpt_interval=0",
    )


if __name__ == "__main__":
    main()
