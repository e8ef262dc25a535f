"""Names below the public interface that tests import; `python -m tests.internals` lists all.

A test reaches the package as a user does: by what `docs/reference.md` documents, by commands, by what packages export.
Whatever else it needs makes the next redesign dearer, so it is here or it is refused (`test_internals.py`).
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
EXPORTING = (
    "fused_norm",
    "fused_norm.kernels",
    "fused_norm.kernels.fp8",
    "fused_norm.patcher",
    "fused_norm.model_configs",
)
"""Packages whose ``__all__`` is public."""

COMMANDS_AND_PLUGINS = (
    "fused_norm.cli.main",
    "fused_norm.integrations.axolotl.FusedNormArgs",
    "fused_norm.integrations.axolotl.FusedNormPlugin",
)
"""What users reach by a console script or by a name in a configuration."""

REASONS: dict[str, str] = {
    "fused_norm.check.against_float64.budget": "computes a bound whose luck no run shows",
    "fused_norm.check.distances.distances": "measures what every verdict is made of, on numbers worked out by hand",
    "fused_norm.check.distances.share_different": "counts what a planted fault has changed",
    "fused_norm.check.distances.slope_errors": "measures what every verdict is made of, on numbers worked out by hand",
    "fused_norm.convergence.call_checks.CallRecord": "sets the numbers of a verdict one by one",
    "fused_norm.convergence.fused_calls.sites_not_compiled": "reads graphs that no compiler makes on demand",
    "fused_norm.convergence.plan.code_digest": "reads the code on disk, which a test does not change",
    "fused_norm.convergence.suite.PairedRuns": "is replaced by records, so that the command judges without training",
    "fused_norm.convergence.suite.fused_for": "is where faults are planted in the model that the command trains",
    "fused_norm.convergence.suite.record_run": "is replaced by records, so that the command judges without training",
    "fused_norm.convergence.tiers.TrainingOptions": "sets micro-batches, clipping and warm-up",
    "fused_norm.convergence.training.RunRecord": "sets the numbers of a verdict one by one",
    "fused_norm.convergence.training.masked_labels": "is the same in stock and fused runs",
    "fused_norm.convergence.training.train": "trains stock and fused models alike: no verdict tells",
    "fused_norm.convergence.verdict.MEASURES": "names each bound that a verdict is tested at",
    "fused_norm.convergence.verdict.judge": "judges records at their bounds, which no real run meets",
    "fused_norm.kernels.codegen": "not looked at yet",
    "fused_norm.kernels.codegen.Cuda": "not looked at yet",
    "fused_norm.kernels.codegen._launch_line": "not looked at yet",
    "fused_norm.kernels.fp8.kernels": "not looked at yet",
    "fused_norm.kernels.fp8.kernels._casts_to_fp8": "not looked at yet",
    "fused_norm.kernels.operator": "not looked at yet",
    "fused_norm.kernels.operator.BackwardCall": "not looked at yet",
    "fused_norm.kernels.operator.OPERATORS": "not looked at yet",
    "fused_norm.kernels.operator.Recompute": "not looked at yet",
    "fused_norm.kernels.operator.calls": "not looked at yet",
    "fused_norm.kernels.operator.force_fused_in_graphs": "not looked at yet",
    "fused_norm.kernels.plans.Device": "not looked at yet",
    "fused_norm.kernels.plans.TABLES": "not looked at yet",
    "fused_norm.kernels.plans.table_of": "not looked at yet",
    "fused_norm.kernels.recording": "not looked at yet",
    "fused_norm.kernels.recording.forget_all": "not looked at yet",
    "fused_norm.kernels.reference": "not looked at yet",
    "fused_norm.kernels.reference.linear_cross_entropy": "not looked at yet",
    "fused_norm.kernels.triton.conv_kernels": "not looked at yet",
    "fused_norm.kernels.triton.cross_entropy_kernels.launch_multiply": "not looked at yet",
    "fused_norm.kernels.triton.devices": "not looked at yet",
    "fused_norm.kernels.triton.devices._hardware_of": "not looked at yet",
    "fused_norm.kernels.triton.devices.use_plans": "not looked at yet",
    "fused_norm.kernels.triton.launch.Launch": "not looked at yet",
    "fused_norm.kernels.triton.launch.launches": "not looked at yet",
    "fused_norm.kernels.triton.norm_backward": "not looked at yet",
    "fused_norm.kernels.triton.norm_forward": "not looked at yet",
    "fused_norm.kernels.triton.qk_launch": "not looked at yet",
    "fused_norm.patcher.activation_recognition.recognise_activation": "not looked at yet",
    "fused_norm.patcher.adapters": "not looked at yet",
    "fused_norm.patcher.adapters.AdapterInput": "not looked at yet",
    "fused_norm.patcher.adapters.FusedAdapter": "not looked at yet",
    "fused_norm.patcher.adapters.dropout_factors": "not looked at yet",
    "fused_norm.patcher.adapters.mask_of_dropout": "not looked at yet",
    "fused_norm.patcher.four_bit": "not looked at yet",
    "fused_norm.patcher.fused_block": "not looked at yet",
    "fused_norm.patcher.fused_block.FusedBlock": "not looked at yet",
    "fused_norm.patcher.fused_block.Rewrite": "not looked at yet",
    "fused_norm.patcher.fused_block.run_fused": "not looked at yet",
    "fused_norm.patcher.fused_classes": "not looked at yet",
    "fused_norm.patcher.fused_norm_module": "not looked at yet",
    "fused_norm.patcher.fused_norm_module.is_disabled": "not looked at yet",
    "fused_norm.patcher.lazy_logits.CrossEntropy": "not looked at yet",
    "fused_norm.patcher.lazy_logits.LazyLogits": "not looked at yet",
    "fused_norm.patcher.lazy_logits.Projection": "not looked at yet",
    "fused_norm.patcher.linear_inputs": "not looked at yet",
    "fused_norm.patcher.losses": "not looked at yet",
    "fused_norm.patcher.losses.FusedHead": "not looked at yet",
    "fused_norm.patcher.losses.LossCall": "not looked at yet",
    "fused_norm.patcher.patterns.patterns_of": "not looked at yet",
    "fused_norm.patcher.patterns.rewritten_forward": "not looked at yet",
    "fused_norm.patcher.recompute": "not looked at yet",
    "fused_norm.patcher.recompute._Recomputable": "not looked at yet",
    "fused_norm.patcher.recompute.call_recomputing": "not looked at yet",
    "fused_norm.patcher.recompute_linears": "not looked at yet",
    "fused_norm.patcher.recompute_linears.LinearOutputs": "not looked at yet",
    "fused_norm.patcher.recompute_linears.Recipe": "not looked at yet",
}
"""Why tests import each name, as far as somebody has looked at it."""


def public_names() -> set[str]:
    """Return the dotted names that users may import."""
    page = (TESTS.parent / "docs" / "reference.md").read_text(encoding="utf-8")
    names = {*re.findall(r"^::: (\S+)", page, re.MULTILINE), *EXPORTING, *COMMANDS_AND_PLUGINS}
    for package in EXPORTING:
        names |= {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    return names


def _is_module(name: str) -> bool:
    path = TESTS.parent / "src" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def names_in(path: Path) -> Iterator[str]:
    """Yield the dotted names of the package that a file uses: imports, attributes of modules, and names in texts."""
    tree, modules, read = ast.parse(path.read_text(encoding="utf-8")), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fused_norm" and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if _is_module(name):
                    modules[alias.asname or alias.name] = name
                else:
                    yield name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fused_norm":
                    modules[alias.asname or "fused_norm"] = alias.name if alias.asname else "fused_norm"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in read:
            inner = [node]
            while isinstance(inner[-1].value, ast.Attribute):
                inner.append(inner[-1].value)
            read.update(inner)
            root = inner[-1].value
            if isinstance(root, ast.Name) and root.id in modules:
                name = modules[root.id]
                for attribute in reversed(inner):
                    name = f"{name}.{attribute.attr}"
                    if not _is_module(name):
                        yield name
                        break
        elif isinstance(node, ast.Constant) and re.fullmatch(r"fused_norm(\.\w+){2,}", str(node.value)):
            yield str(node.value)
    yield from (name for name in modules.values() if name.count(".") > 0)


def internals(*paths: Path) -> dict[str, set[str]]:
    """Return the internal names that files below these paths use, each with the files that do."""
    public, users = public_names(), defaultdict(set)
    for path in paths or (TESTS,):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if file.resolve() != Path(__file__).resolve():
                for name in names_in(file):
                    if name not in public and not name.endswith("__"):
                        users[name].add(file.name)
    return dict(sorted(users.items()))


if __name__ == "__main__":
    found = internals(*map(Path, sys.argv[1:]))
    sys.stdout.writelines(f"{name}  {', '.join(sorted(files))}\n" for name, files in found.items())
    sys.stdout.write(f"{len(found)} names\n")
