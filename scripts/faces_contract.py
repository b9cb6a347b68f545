"""A contract for import-linter: a package of `skyrl_train` is used from outside of it through its faces alone.

A face is the `__init__.py` of a package, at any depth: what it imports as itself (`import NAME as NAME`), or lists in
`__all__`, others may use. Inside of one package at the top level (`skyrl_train.rollout`, with all folders in it) modules
import each other as they like.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


def source(module: str) -> Path:
    """Return the file of a module."""
    spec = find_spec(module)
    assert spec is not None, module
    return Path(str(spec.origin))


def exported(package: str) -> list[str]:
    """Return what a package exports, read without running it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source(package).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names += ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom):
            names += [each.name for each in node.names if each.asname == each.name]
    return names


def is_private(module: str) -> bool:
    """Whether a module is no face, nor a module that its face exports, nor one at the top level of `skyrl_train`."""
    package, _, name = module.rpartition(".")
    return module.count(".") > 1 and source(module).name != "__init__.py" and name not in exported(package)


def owner(module: str) -> str:
    """Return the package at the top level that a module is in: `skyrl_train.rollout` for
    `skyrl_train.rollout.hosts.local`."""
    return ".".join(module.split(".")[:2])


class FacesContract(Contract):
    """Modules of other packages import from a face."""

    type_name = "faces"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Find what is imported by its path from outside of its package."""
        ours = sorted(module for module in graph.modules if module.split(".")[0] == "skyrl_train")
        found = [
            (importer, module)
            for module in ours
            if is_private(module)
            for importer in sorted(graph.find_modules_that_directly_import(module))
            if owner(importer) != owner(module)
        ]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Say which import to write instead."""
        for importer, module in check.metadata["found"]:
            output.print_error(f"{importer} imports {module}: import from {module.rpartition('.')[0]}", bold=False)
