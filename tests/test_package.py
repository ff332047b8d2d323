"""The package as a user installs it: complete, with one version, and working with nothing but torch and numpy."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import flce_ref

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flce_ref"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

EVERYTHING_WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for name in ("matplotlib", "triton", "cuda", "transformers", "IPython", "tqdm", "scipy", "pandas", "yaml"):
    sys.modules[name] = None  # as if it were not installed
import flce_ref
named_after_what_they_need = ("kernels.triton", "kernels.triton_tiles", "integrations.transformers")
for module in pkgutil.walk_packages(flce_ref.__path__, "flce_ref."):
    if module.name.removeprefix("flce_ref.") not in ("__main__", *named_after_what_they_need):
        importlib.import_module(module.name)
"""


def test_every_file_of_the_package_is_installed_with_it() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    data = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    assert [path.name for path in data if not any(path.match(pattern) for pattern in patterns)] == []
    assert PACKAGE / "py.typed" in data
    assert [folder for folder in {path.parent for path in data} if not (folder / "__init__.py").exists()] == []


def test_every_module_can_be_imported_with_torch_and_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", EVERYTHING_WITHOUT_EXTRAS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_there_is_one_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    changed = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited and changed
    assert {PROJECT["project"]["version"], cited[1], changed[1]} == {flce_ref.__version__}
