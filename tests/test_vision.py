"""The guarded import of torchvision and lpips, each case in a process of its own."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter with `path` before everything else on sys.path."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def fake(folder: Path, source: str) -> Path:
    """Write a package torchvision with `source` as its __init__ and a submodule `part`."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "part.py").write_text("loaded = []\n")
    return folder


def test_torchvision_and_lpips_can_be_imported():
    code = (
        "from ppbench.base.vision import torchvision\n"
        "first = torchvision()\n"
        "assert torchvision() is first\n"
        "assert first.datasets.CIFAR10 and first.transforms.ToTensor\n"
        "import torch\n"
        "assert first.models.alexnet(weights=None).features(torch.zeros(1, 3, 64, 64)).shape == (1, 256, 1, 1)\n"
    )
    if find_spec("lpips") is not None:
        code += "from ppbench.base.vision import lpips\nassert lpips().LPIPS\n"
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_a_missing_schema_is_declared_after_the_import_has_failed(tmp_path):
    source = """
import torch
from . import part
if not hasattr(torch.ops.torchvision, "nms"):
    part.loaded.append("failed")
    raise RuntimeError("operator torchvision::nms does not exist")
"""
    code = """
import torch
from ppbench.base.vision import torchvision
module = torchvision()
assert module.part.loaded == [], "a module of the failed import was kept"
assert torch.ops.torchvision.nms and torch.ops.torchvision.qnms
assert torchvision() is module
"""
    result = python(code, fake(tmp_path, source))
    assert result.returncode == 0, result.stderr


def test_nothing_is_declared_for_a_torchvision_that_works_or_fails_otherwise(tmp_path):
    source = """
import builtins
if not hasattr(builtins, "tried"):
    builtins.tried = True
    raise RuntimeError("broken for another reason")
"""
    code = """
import torch
from ppbench.base.vision import torchvision
try:
    torchvision()
except RuntimeError as error:
    assert str(error) == "broken for another reason"
else:
    raise AssertionError("swallowed")
assert not hasattr(torch.ops.torchvision, "nms")
torchvision()
assert not hasattr(torch.ops.torchvision, "nms")
"""
    result = python(code, fake(tmp_path, source))
    assert result.returncode == 0, result.stderr


def test_libraries_are_loaded_where_they_are_used():
    code = """
import sys, ppbench.task.dataset, ppbench.task.downloads, ppbench.task.parquet, ppbench.task.table
import ppbench.task.imagefolder, ppbench.task.embedded
heavy = {"torchvision", "sklearn", "pandas", "pyarrow", "PIL", "lpips"} & set(sys.modules)
assert not heavy, heavy
import ppbench.run.evaluation, ppbench.commands.terminal
heavy = {"matplotlib", "seaborn", "jinja2"} & set(sys.modules)
assert not heavy, heavy
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


def imports(source: str) -> set[str]:
    """Return the top-level packages that `source` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
    return found


def test_nobody_else_imports_torchvision_or_lpips():
    assert imports("def f():\n    from torchvision.io import x\n    import lpips") == {"torchvision", "lpips"}
    modules = [path for folder in ("ppbench", "attacks", "defenses") for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 20
    guilty = [str(path) for path in modules if imports(path.read_text(encoding="utf-8")) & {"torchvision", "lpips"}]
    assert not guilty
