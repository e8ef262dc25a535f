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
    "fused_norm.check.against_float64.budget": "its rule for errors is checked on numbers, which no model gives",
    "fused_norm.check.distances.distances": "the distances that verdicts use are checked on small tensors",
    "fused_norm.check.distances.share_different": "a planted fault counts the elements that it changed",
    "fused_norm.check.distances.slope_errors": "the distances that verdicts use are checked on small tensors",
    "fused_norm.convergence.call_checks.CallRecord": "calls of a step are made wrong by hand, which no run makes wrong",
    "fused_norm.convergence.fused_calls.sites_not_compiled": (
        "calls of a step are made wrong by hand, which no run makes wrong"
    ),
    "fused_norm.convergence.plan.code_digest": "the suite's list is checked against all options",
    "fused_norm.convergence.suite.PairedRuns": "a run is judged in the process in which a fault is planted",
    "fused_norm.convergence.suite.fused_for": "a run is judged in the process in which a fault is planted",
    "fused_norm.convergence.suite.record_run": "a run is judged in the process in which a fault is planted",
    "fused_norm.convergence.tiers.TrainingOptions": "the suite's list is checked against all options",
    "fused_norm.convergence.training.RunRecord": "labels and steps are compared with a loop written out",
    "fused_norm.convergence.training.masked_labels": "labels and steps are compared with a loop written out",
    "fused_norm.convergence.training.train": "labels and steps are compared with a loop written out",
    "fused_norm.convergence.verdict.MEASURES": "a verdict is asked of numbers that no run gives",
    "fused_norm.convergence.verdict.judge": "a verdict is asked of numbers that no run gives",
    "fused_norm.kernels.codegen": "a launcher's generated text is read, as AMD's and CUDA's differ and no GPU is here",
    "fused_norm.kernels.codegen.Cuda": (
        "a launcher's generated text is read, as AMD's and CUDA's differ and no GPU is here"
    ),
    "fused_norm.kernels.codegen._launch_line": (
        "a launcher's generated text is read, as AMD's and CUDA's differ and no GPU is here"
    ),
    "fused_norm.kernels.fp8.kernels": "a test takes the hardware's cast away, so that the one in software runs",
    "fused_norm.kernels.fp8.kernels._casts_to_fp8": (
        "a test takes the hardware's cast away, so that the one in software runs"
    ),
    "fused_norm.kernels.lora_linear.LORA_LINEAR": "not looked at yet",
    "fused_norm.kernels.norm.RMS_NORM": "not looked at yet",
    "fused_norm.kernels.operator": "its registry is what contracts run over",
    "fused_norm.kernels.operator.BackwardCall": "planted faults and compiled launches call a backward by itself",
    "fused_norm.kernels.operator.OPERATORS": "contracts run over every operator, so that a new one cannot be left out",
    "fused_norm.kernels.operator.Recompute": "a planted fault is put into what recomputes",
    "fused_norm.kernels.operator.calls": "a test counts the fused calls of a step, or takes them away",
    "fused_norm.kernels.operator.force_fused_in_graphs": "compiled graphs call operators on a CPU in tests alone",
    "fused_norm.kernels.operator.record": "not looked at yet",
    "fused_norm.kernels.plans.Device": "plans of GPUs that are not here are compiled",
    "fused_norm.kernels.plans.TABLES": "every row of every table of plans is tried",
    "fused_norm.kernels.plans.table_of": "every row of every table of plans is tried",
    "fused_norm.kernels.recording": "tests start without recordings of other tests",
    "fused_norm.kernels.recording.forget_all": "tests start without recordings of other tests",
    "fused_norm.kernels.triton.conv_kernels": "a test makes its rows few, so that a small input has several blocks",
    "fused_norm.kernels.triton.cross_entropy_kernels.launch_multiply": "it is compiled for GPUs that are not here",
    "fused_norm.kernels.triton.devices": "a test says which GPU there is",
    "fused_norm.kernels.triton.devices._hardware_of": "a test says which GPU there is",
    "fused_norm.kernels.triton.devices.use_plans": "a test says which GPU there is",
    "fused_norm.kernels.triton.launch.Launch": "kernels of a step are counted and compiled at their one door",
    "fused_norm.kernels.triton.launch.launches": "kernels of a step are counted and compiled at their one door",
    "fused_norm.kernels.triton.norm_backward": "a test makes its rows few, so that a small input has several blocks",
    "fused_norm.kernels.triton.norm_forward": "a test makes its rows few, so that a small input has several blocks",
    "fused_norm.kernels.triton.qk_launch": "a test makes its rows few, so that a small input has several blocks",
    "fused_norm.patcher.activation_recognition.recognise_activation": (
        "forwards as text have no model, so that a test names what a patch would find"
    ),
    "fused_norm.patcher.adapters": "a test asks what an adapter reads, or plants a fault there",
    "fused_norm.patcher.adapters.AdapterInput": "a planted fault is put into a LoRA layer's call",
    "fused_norm.patcher.adapters.FusedAdapter": "a planted fault is put into a LoRA layer's call",
    "fused_norm.patcher.adapters.dropout_factors": "the mask that a kernel draws is compared with PyTorch's",
    "fused_norm.patcher.adapters.mask_of_dropout": "the mask that a kernel draws is compared with PyTorch's",
    "fused_norm.patcher.convolution_recognition.recognise_convolution": "not looked at yet",
    "fused_norm.patcher.four_bit": "a test takes names of bitsandbytes away, as other releases have them",
    "fused_norm.patcher.fused_block": "a planted fault is put into the methods that rewritten forwards call",
    "fused_norm.patcher.fused_block.FusedBlock": "a planted fault is put into the methods that rewritten forwards call",
    "fused_norm.patcher.fused_block.Rewrite": "forwards as text have no model, so that a test says what is to be fused",
    "fused_norm.patcher.fused_block.run_fused": "a planted fault is put into the door of all operators",
    "fused_norm.patcher.fused_classes": "a planted fault keeps a guard from being asked",
    "fused_norm.patcher.fused_norm_module": (
        "the log's memory of what it has said is emptied, and a planted fault is put in"
    ),
    "fused_norm.patcher.fused_norm_module.is_disabled": (
        "a planted fault is off inside disabled(), as the fused code is"
    ),
    "fused_norm.patcher.lazy_logits.CrossEntropy": (
        "a planted fault is put into the fused loss, and a test says which loss ran"
    ),
    "fused_norm.patcher.lazy_logits.LazyLogits": "a test asks whether logits are still lazy",
    "fused_norm.patcher.lazy_logits.Projection": (
        "a planted fault is put into the fused loss, and a test says which loss ran"
    ),
    "fused_norm.patcher.linear_inputs": "a planted fault is put into what consumers are given",
    "fused_norm.patcher.losses": "a planted fault is put into the fused loss",
    "fused_norm.patcher.losses.FusedHead": "a planted fault is put into the fused loss",
    "fused_norm.patcher.losses.LossCall": "a planted fault is put into the fused loss",
    "fused_norm.patcher.norm_recognition.recognise": "not looked at yet",
    "fused_norm.patcher.patterns.patterns_of": (
        "forwards as text have no model, so that a test says what is to be fused"
    ),
    "fused_norm.patcher.patterns.rewritten_forward": (
        "forwards as text have no model, so that a test says what is to be fused"
    ),
    "fused_norm.patcher.probe.UnrecognisedError": "not looked at yet",
    "fused_norm.patcher.recompute": "what a step keeps is seen only in the function that keeps it",
    "fused_norm.patcher.recompute._Recomputable": "a planted fault is put into what recomputes",
    "fused_norm.patcher.recompute.call_recomputing": "what a step keeps is seen only in the function that keeps it",
    "fused_norm.patcher.recompute_linears": "what a step keeps is seen only in the function that keeps it",
    "fused_norm.patcher.recompute_linears.LinearOutputs": "a planted fault is put into what recomputes",
    "fused_norm.patcher.recompute_linears.Recipe": "what a step keeps is seen only in the function that keeps it",
    "fused_norm.patcher.rotation_recognition.recognise_rotation": "not looked at yet",
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
