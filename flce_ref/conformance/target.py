"""How the command line names an implementation and its settings."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .subject import message_of


def load(name: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION or FILE.py:FUNCTION names; modules are looked for in the working directory too.

    Raises:
        ValueError: the name has no such form, the import fails, or there is no such function; the message says which.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ValueError(f"expected MODULE:FUNCTION or FILE.py:FUNCTION, got {name!r}")
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {module_name!r} failed: {type(error).__name__}: {message_of(error)}") from error
    try:
        function = attrgetter(attribute)(module)
    except AttributeError:
        known = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_"))
        raise ValueError(f"{module_name!r} has no {attribute!r}; it has: {known or 'no functions'}") from None
    if not callable(function):
        raise ValueError(f"{name!r} is a {type(function).__name__}, which can't be called")
    return function  # type: ignore[no-any-return]


def parse_setting(text: str) -> tuple[str, Any]:
    """key=value, the value a Python literal (16, None, "mean"), a torch dtype (float32, torch.bfloat16) or a string.

    Raises:
        ValueError: `text` has no such form.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(f"expected key=value, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        return key, dtype if isinstance(dtype, torch.dtype) else value


def _import_module(name: str) -> ModuleType:
    _search_first(Path.cwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.resolve(strict=True)
    # Imported by its name where that finds this very file, so that a subprocess can import it again.
    if path.stem not in sys.modules:
        _search_first(path.parent)
        if (found := importlib.util.find_spec(path.stem)) and found.origin == str(path):
            return importlib.import_module(path.stem)
    elif getattr(sys.modules[path.stem], "__file__", None) == str(path):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(f"verified_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _search_first(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
