"""Who may import what (CONTRIBUTING.md has the table), and that importing does nothing."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names
ONLINE_TRAINER = {
    "adamw",
    "buffer",
    "curriculum",
    "errors",
    "evidence",
    "learner_config",
    "lesson",
    "online",
    "reliability",
    "rounds",
    "step_graph",
    "student",
    "student_file",
    "teacher",
    "trie_marginal",
}
RUNTIME = {"numpy", "onnxruntime", "tokenizers", "jinja2"}
TRAINER = {
    "numpy",
    "onnx",
    "torch",
    "transformers",
    "safetensors",
    "peft",
    "accelerate",
    "tokenizers",
}
EXPORT = {
    "numpy",
    "torch",
    "transformers",
    "onnxscript",
    "onnx_ir",
    "optimum",
    "safetensors",
    "tokenizers",
}
# Packages of extras, imported by name through `extras.need` inside functions.
BENCH_EXTRAS = {"matplotlib", "torch", "transformers", "onnxruntime_genai", "datasets"}
BENCH_MODULES = {"peer_worker", "peers", "bench", "bench_command", "bench_output", "prompt_files"}
BENCH_MODULES |= {"provenance", "bench_report"}


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield each imported module, its level of relative dots and whether a function imports it."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, 0, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield child.module or "", child.level, inside
            is_call = isinstance(child, ast.Call) and isinstance(
                child.func, ast.Name | ast.Attribute
            )
            if is_call:
                name = getattr(child.func, "id", getattr(child.func, "attr", ""))
                first = child.args[0] if child.args else None
                literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
                if name in ("need", "import_module", "__import__") and literal:
                    yield first.value, 0, inside
            deeper = inside or isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            yield from walk(child, deeper)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).glob("*.py"))


def outsiders(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield what a file imports from other packages."""
    for module, level, inside in imports(path):
        top = module.split(".")[0]
        if level == 0 and top not in STDLIB:
            yield (module if top == "edgedraft" else top), inside


@pytest.mark.parametrize("path", sources("runtime"), ids=lambda p: p.name)
def test_the_runtime_needs_four_packages_and_nothing_of_ours(path: Path) -> None:
    for module, inside in outsiders(path):
        if module in BENCH_EXTRAS:
            assert inside and path.stem in BENCH_MODULES, f"{path.name} imports {module}"
        else:
            assert module in RUNTIME, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", sources("runtime"), ids=lambda p: p.name)
def test_onnxruntime_is_imported_through_one_door(path: Path) -> None:
    """Telemetry has to be switched off before the first import."""
    if path.stem == "peer_worker":
        return  # a process of its own, with another engine in it
    doors = [m for m, _ in outsiders(path) if m == "onnxruntime"]
    assert doors == (["onnxruntime"] if path.stem == "ort_session" else [])
    assert all(inside for m, inside in outsiders(path) if m == "onnxruntime")


@pytest.mark.parametrize("path", sources("trainer"), ids=lambda p: p.name)
def test_the_trainer_imports_what_its_table_allows(path: Path) -> None:
    allowed = {"numpy", "onnxruntime"} if path.stem in ONLINE_TRAINER else TRAINER
    for module, _ in outsiders(path):
        ours = module.startswith(("edgedraft.runtime", "edgedraft.trainer"))
        assert ours or module in allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", sources("export"), ids=lambda p: p.name)
def test_the_exporter_imports_what_its_table_allows(path: Path) -> None:
    for module, _ in outsiders(path):
        ours = module.startswith(("edgedraft.runtime", "edgedraft.export"))
        assert ours or module in EXPORT, f"{path.name} imports {module}"


@pytest.mark.parametrize("package", ["trainer", "export"])
def test_importing_a_package_that_needs_torch_imports_nothing(package: str) -> None:
    assert list(imports(ROOT / package / "__init__.py")) == []


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    clean = {k: v for k, v in os.environ.items() if "TELEMETRY" not in k}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_command_line_brings_no_heavy_package() -> None:
    loaded = run_python(
        "import sys, edgedraft.runtime.cli; print(*{m.split('.')[0] for m in sys.modules})"
    ).split()
    heavy = {"torch", "transformers", "onnxruntime", "onnx", "matplotlib", "datasets", "jinja2"}
    assert "edgedraft" in loaded
    assert not heavy & set(loaded)


def test_learning_on_a_device_needs_nothing_that_a_device_lacks() -> None:
    loaded = run_python(
        "import sys, edgedraft.trainer.online; print(*{m.split('.')[0] for m in sys.modules})"
    ).split()
    assert "edgedraft" in loaded
    assert not {"torch", "transformers", "onnx", "safetensors", "peft"} & set(loaded)


def test_importing_changes_neither_environment_nor_logging_nor_randomness() -> None:
    code = """
import logging, os, random, numpy
def state():
    log = logging.root
    noise = numpy.random.get_state()[1].tolist()
    return dict(os.environ), random.getstate(), list(log.handlers), log.level, noise
before = state()
import edgedraft.runtime.cli
assert state() == before
"""
    assert run_python(code) == ""


def test_telemetry_is_forbidden_before_onnxruntime_is_imported() -> None:
    code = """
import builtins, os, sys
real = builtins.__import__
def watch(name, *rest):
    if name.split(".")[0] == "onnxruntime" and "onnxruntime" not in sys.modules:
        print(os.environ.get("ORT_DISABLE_TELEMETRY"), os.environ.get("ORT_TELEMETRY_DISABLED"))
    return real(name, *rest)
builtins.__import__ = watch
from edgedraft.runtime.ort_session import onnxruntime
onnxruntime()
"""
    first, *_ = run_python(code).splitlines()
    assert first == "1 1"


def test_telemetry_stays_forbidden_when_someone_imported_onnxruntime_first() -> None:
    code = """
import logging, onnxruntime as ort
called = []
ort.disable_telemetry_events = lambda: called.append(1)
logging.basicConfig()
from edgedraft.runtime.ort_session import onnxruntime
onnxruntime()
print(len(called))
"""
    assert run_python(code) == "1"


def test_all_names_what_the_runtime_exports() -> None:
    runtime = importlib.import_module("edgedraft.runtime")
    assert runtime.__all__ == sorted(runtime.__all__)
    tree = ast.parse((ROOT / "runtime" / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(runtime.__all__) == imported
    for name in runtime.__all__:
        assert getattr(runtime, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("package", ["runtime", "trainer", "export"])
def test_types_are_shipped(package: str) -> None:
    assert files(f"edgedraft.{package}").joinpath("py.typed").is_file()


def test_the_namespace_has_no_package_file_of_its_own() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not hasattr(importlib.import_module("edgedraft"), "__file__") or (
        importlib.import_module("edgedraft").__file__ is None
    )


@pytest.mark.parametrize("path", [p for x in ("runtime", "export") for p in sources(x)], ids=str)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.stem in ("cli", "__main__", "chat", "bench_command", "peer_worker"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prints = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not prints, f"{path.name} prints in lines {prints}"
