"""The project's own files agree with each other, and nobody else owns our import names."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import kernels

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = ("router", "prefill_worker", "decode_worker", "transfer", "kernels", "engine", "protocol", "loadgen", "baton", "demo")


def test_no_other_distribution_owns_our_import_names() -> None:
    owners = packages_distributions()
    assert {name: set(owners.get(name, ["baton-serve"])) for name in OURS} == {name: {"baton-serve"} for name in OURS}


def test_kernels_has_no_version_that_transformers_would_take_for_another_package() -> None:
    assert not hasattr(kernels, "__version__")


def test_the_routers_dependencies_are_a_part_of_all_dependencies() -> None:
    everything = set(PYPROJECT["project"]["dependencies"])
    router = set(PYPROJECT["dependency-groups"]["router"])
    assert router < everything
    assert not {requirement for requirement in router if requirement.startswith(("torch", "ucxx"))}


def test_each_package_is_installed_checked_and_in_the_import_contract() -> None:
    tools = PYPROJECT["tool"]
    assert set(tools["importlinter"]["root_packages"]) == set(OURS)
    assert set(OURS) <= set(tools["mypy"]["files"])
    assert {pattern.rstrip("*") for pattern in tools["setuptools"]["packages"]["find"]["include"]} == set(OURS)


def test_every_path_that_the_documents_name_exists() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/benchmarks.md"):
        named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|toml|yaml|py)|Makefile|Dockerfile)`", (ROOT / document).read_text())
        assert named, f"{document} names no path"
        missing = [path for path in named if not (ROOT / path).exists()]
        assert not missing, f"{document} names {missing}"


def test_what_the_packages_import_is_what_they_declare() -> None:
    """Every third-party module that our packages import is a dependency, and every dependency is imported (or served by one that is)."""
    used = {
        name.split(".")[0]
        for package in OURS
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    } - set(sys.stdlib_module_names) - set(OURS)  # fmt: skip
    declared = {
        re.split(r"[><=]", requirement)[0]
        for requirement in [*PYPROJECT["project"]["dependencies"], *PYPROJECT["project"]["optional-dependencies"]["bench"]]
    }
    modules = {name: {"pyzmq": "zmq", "ucxx-cu13": "ucxx", "prometheus-client": "prometheus_client"}.get(name, name) for name in declared}
    only_inside_others = {"httptools"}  # named to uvicorn
    come_with_others = {"starlette"}  # fastapi's own base
    assert used - come_with_others == set(modules.values()) - only_inside_others


def test_the_two_commands_of_the_readme_are_makefile_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    promised = set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= promised <= targets
