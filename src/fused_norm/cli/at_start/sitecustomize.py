"""Fuses the models of a Python process that a script under ``fused-norm run`` has started.

Python imports a module of this name when it starts, and the command puts this folder into the ``PYTHONPATH`` of such
processes. Nothing else is imported until a process imports the models of transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class _ModelingUtilsFinder(MetaPathFinder):
    """Finds the module that has ``PreTrainedModel`` as Python would, and has models fused once it is imported."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "transformers.modeling_utils" else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_fuse(module: ModuleType) -> None:
            execute(module)
            _fuse()

        loader.exec_module = execute_and_fuse
        return spec


def _fuse() -> None:
    """Fuse the models of this process, unless it belongs to an environment that the command is not part of."""
    if importlib.util.find_spec("fused_norm"):
        importlib.import_module("fused_norm.cli.run_command").fuse_this_process()
        return
    stock = f"fused-norm: models stay stock in this process: {sys.executable} has no fused_norm"
    if json.loads(os.environ["FUSED_NORM_RUN"])["strict"]:
        raise ImportError(stock)
    print(stock, file=sys.stderr, flush=True)


sys.meta_path.insert(0, _ModelingUtilsFinder())

# As if this one were not there: the folder goes, and a module of this name of the user's own is imported.
sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
_this = sys.modules.pop(__name__)
try:
    importlib.import_module(__name__)
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
    sys.modules[__name__] = _this
