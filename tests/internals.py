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
    "fused_norm.check.against_stock.CallRecord": "sets the numbers of a verdict one by one",
    "fused_norm.check.distances.distances": "measures what every verdict is made of, on numbers worked out by hand",
    "fused_norm.check.distances.share_apart": "measures what every verdict is made of, on numbers worked out by hand",
    "fused_norm.check.fast_interpreter.speed_up": "makes tests faster, and is compared with Triton's own",
    "fused_norm.check.distances.slope_errors": "measures what every verdict is made of, on numbers worked out by hand",
    "fused_norm.check.fused_calls.sites_not_compiled": "reads graphs that no compiler makes on demand",
    "fused_norm.check.fused_calls.sites_not_seen": ("is asked about sites without a call, which no model of tests has"),
    "fused_norm.check.log_prob_losses": "gets planted faults in what losses of log-probabilities are made of",
    "fused_norm.convergence.plan.code_digest": "reads the code on disk, which a test does not change",
    "fused_norm.convergence.suite.PairedRuns": "is replaced by records, so that the command judges without training",
    "fused_norm.convergence.suite.fused_for": "is where faults are planted in the model that the command trains",
    "fused_norm.convergence.suite.record_run": "is replaced by records, so that the command judges without training",
    "fused_norm.convergence.suite.run_baseline": "is kept, so that many faults are held to one stock run",
    "fused_norm.convergence.tiers.TrainingOptions": "sets micro-batches, clipping and warm-up",
    "fused_norm.convergence.training.RunRecord": "sets the numbers of a verdict one by one",
    "fused_norm.convergence.training.masked_labels": "is the same in stock and fused runs",
    "fused_norm.convergence.training.train": "trains stock and fused models alike: no verdict tells",
    "fused_norm.convergence.verdict.MEASURES": "names each bound that a verdict is tested at",
    "fused_norm.convergence.verdict.judge": "judges records at their bounds, which no real run meets",
    "fused_norm.kernels.backward.BackwardArguments": "asks for a backward's launches without autograd",
    "fused_norm.kernels.backward.KernelBackward": "asks for the launches of a backward without an operator of its own",
    "fused_norm.kernels.codegen": "replaces a part of PyTorch that is not public, as a release without it would",
    "fused_norm.kernels.codegen.Cuda": "makes the call of a compiled kernel as three releases of Triton want it",
    "fused_norm.kernels.codegen._launch_line": "refuses a number that a compiled kernel counts in 64 bits",
    "fused_norm.kernels.compiler_policy": "sets from how many elements on compiled graphs get the operator",
    "fused_norm.kernels.compiler_policy.force_fused_in_graphs": "makes compiled graphs fuse whatever their size",
    "fused_norm.kernels.fp8._casts_to_fp8": "decides by the GPU's capability, and no test has an old GPU",
    "fused_norm.kernels.norm_kernels": "changes plans: small tensors reach what large ones would",
    "fused_norm.kernels.operator.OPERATORS": "lists the operators, so that no test forgets a new one",
    "fused_norm.kernels.operator.Recompute": "gets a planted fault: what is recomputed is too large",
    "fused_norm.kernels.operator.calls": "computes calls by stock code instead, or tells which were made",
    "fused_norm.kernels.plans.Device": "describes GPUs that no test has",
    "fused_norm.kernels.plans.TABLES": "lists the measured plans: each row of them is reached and compiles",
    "fused_norm.kernels.plans.table_of": "chooses a table for GPUs that no test has",
    "fused_norm.kernels.qk_kernels": "changes plans: small tensors reach what large ones would",
    "fused_norm.kernels.recording": "lowers how much is recorded, and takes away a part of PyTorch that is not public",
    "fused_norm.kernels.recording.Recording": "a test counts what is recorded",
    "fused_norm.kernels.recording.forget_all": "makes calls first calls again: a test starts without recordings",
    "fused_norm.kernels.switch.switch": "tells a planted fault to leave the stock step right",
    "fused_norm.kernels.triton.call.Call": "counts kernels of a step, and is built by forwards with planted faults",
    "fused_norm.kernels.triton.devices": "answers for GPUs that no test has",
    "fused_norm.kernels.triton.devices._hardware_of": "reads the facts of GPUs that no test has",
    "fused_norm.kernels.triton.devices.use_plans": "puts plans of other GPUs in use, and lets small rows take them",
    "fused_norm.kernels.triton.launch.Launch": "shows each launch before it runs: its offsets, plan and results",
    "fused_norm.kernels.vocabulary_head.launch_multiply": "compiles a kernel that no call launches alone",
    "fused_norm.patcher.activation_recognition.recognise_activation": (
        "forwards as text have no model, so that a test names what a patch would find"
    ),
    "fused_norm.patcher.adapters": "refuses a fused call, or notes which masks are drawn, where a layer asks for it",
    "fused_norm.patcher.adapters.AdapterInput": "a planted fault is put into a LoRA layer's call",
    "fused_norm.patcher.adapters.FusedAdapter": "gets planted faults in an adapter's forward and casts",
    "fused_norm.patcher.adapters.dropout_factors": "holds factors to the bits of dropout on a GPU",
    "fused_norm.patcher.adapters.mask_of_dropout": "holds masks to those of dropout on a GPU",
    "fused_norm.patcher.cuda_graphs": "gets a stand-in for the device that replays, as no test of CI has a GPU",
    "fused_norm.patcher.four_bit": "makes bitsandbytes multiply a shape itself, as it does on some GPUs",
    "fused_norm.patcher.fused_block.FusedBlock": "gets planted faults in what a rewritten forward calls",
    "fused_norm.patcher.fused_block.Rewrite": "forwards as text have no model, so that a test says what is to be fused",
    "fused_norm.patcher.fused_classes": "gets a planted fault",
    "fused_norm.patcher.fused_norm_module": "forgets which warnings were given",
    "fused_norm.patcher.lazy_logits.CrossEntropy": (
        "a planted fault is put into the fused loss, and a test says which loss ran"
    ),
    "fused_norm.patcher.lazy_logits.LazyLogits": "a test asks whether logits are still lazy",
    "fused_norm.patcher.lazy_logits.Projection": (
        "a planted fault is put into the fused loss, and a test says which loss ran"
    ),
    "fused_norm.patcher.graph_guards": "loses one rule after the other, as a planted fault",
    "fused_norm.patcher.graph_guards.LatestArguments": "tells numbers apart that give a layer the same results",
    "fused_norm.patcher.linear_inputs": "gets a planted fault: no norm knows that its consumers read 16 bits",
    "fused_norm.patcher.linear_inputs.ConsumerOutputs": "gets a planted fault: another norm's output",
    "fused_norm.patcher.losses": "a planted fault is put into the fused loss",
    "fused_norm.patcher.losses.FusedHead": "a planted fault is put into the fused loss",
    "fused_norm.patcher.losses.LossCall": "a planted fault is put into the fused loss",
    "fused_norm.patcher.norm_recognition.recognise": (
        "code that changes process state is run to be recognised, by itself"
    ),
    "fused_norm.patcher.patterns.convolutions.recognise_convolution": (
        "code that changes process state is run to be recognised, by itself"
    ),
    "fused_norm.patcher.patterns.patterns_of": (
        "forwards as text have no model, so that a test says what is to be fused"
    ),
    "fused_norm.patcher.patterns.rewritten_forward": (
        "forwards as text have no model, so that a test says what is to be fused"
    ),
    "fused_norm.patcher.patterns.rotations.recognise_rotation": (
        "code that changes process state is run to be recognised, by itself"
    ),
    "fused_norm.patcher.probe.UnrecognisedError": "code that changes process state is run to be recognised, by itself",
    "fused_norm.patcher.recompute": "forgets warnings, and loses a part of PyTorch that is not public",
    "fused_norm.patcher.recompute._Recomputable": "gets a planted fault: what is recomputed is held as well",
    "fused_norm.patcher.recompute.call_recomputing": "recomputes what no model has: views, writes, streams",
    "fused_norm.patcher.recompute_linears": "notes which products are computed again",
    "fused_norm.patcher.recompute_linears.LinearOutputs": "gets a planted fault: outputs of adapters are kept silently",
    "fused_norm.patcher.recompute_linears.Recipe": "tells recipes from tensors that a graph saved",
    "fused_norm.patcher.survey": "does not refuse a CPU, on which a stand-in replays",
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
