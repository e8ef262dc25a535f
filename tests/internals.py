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
    "fused_norm.check.against_float64": "not looked at yet",
    "fused_norm.check.against_float64.Deviation": "not looked at yet",
    "fused_norm.check.against_float64.SLACK": "not looked at yet",
    "fused_norm.check.against_float64.STOCK_STEPS": "not looked at yet",
    "fused_norm.check.against_float64.UncheckableError": "not looked at yet",
    "fused_norm.check.against_float64.budget": "not looked at yet",
    "fused_norm.check.against_float64.relative_errors": "not looked at yet",
    "fused_norm.check.distances.FEW": "not looked at yet",
    "fused_norm.check.distances.TRIMMED": "not looked at yet",
    "fused_norm.check.distances.ZERO_SHARE": "not looked at yet",
    "fused_norm.check.distances.distances": "not looked at yet",
    "fused_norm.check.distances.share_different": "not looked at yet",
    "fused_norm.check.distances.slope_errors": "not looked at yet",
    "fused_norm.cli.common.UsageError": "not looked at yet",
    "fused_norm.cli.env_command.environment": "not looked at yet",
    "fused_norm.cli.importlib.import_module": "not looked at yet",
    "fused_norm.convergence.call_checks.CallRecord": "not looked at yet",
    "fused_norm.convergence.call_checks.calls_of_step": "not looked at yet",
    "fused_norm.convergence.call_checks.compare": "not looked at yet",
    "fused_norm.convergence.comparison.Comparison": "not looked at yet",
    "fused_norm.convergence.comparison.FEATURES": "not looked at yet",
    "fused_norm.convergence.comparison.by_baseline": "not looked at yet",
    "fused_norm.convergence.comparison.options_for_feature": "not looked at yet",
    "fused_norm.convergence.fused_calls.FusedCall": "not looked at yet",
    "fused_norm.convergence.fused_calls.sites_not_compiled": "not looked at yet",
    "fused_norm.convergence.fused_calls.sites_not_seen": "not looked at yet",
    "fused_norm.convergence.fused_calls.watched_calls": "not looked at yet",
    "fused_norm.convergence.held_memory.held_memory": "not looked at yet",
    "fused_norm.convergence.model_source.ModelSource": "not looked at yet",
    "fused_norm.convergence.model_source.add_adapters": "not looked at yet",
    "fused_norm.convergence.paired_runs": "not looked at yet",
    "fused_norm.convergence.plan.Plan": "not looked at yet",
    "fused_norm.convergence.plan.code_digest": "not looked at yet",
    "fused_norm.convergence.plan.comparisons_of": "not looked at yet",
    "fused_norm.convergence.suite": "not looked at yet",
    "fused_norm.convergence.suite.Baseline": "not looked at yet",
    "fused_norm.convergence.suite.Progress": "not looked at yet",
    "fused_norm.convergence.suite.ResultStore": "not looked at yet",
    "fused_norm.convergence.suite.fused_for": "not looked at yet",
    "fused_norm.convergence.suite.run_baseline": "not looked at yet",
    "fused_norm.convergence.suite.run_fused": "not looked at yet",
    "fused_norm.convergence.suite.train_fused": "not looked at yet",
    "fused_norm.convergence.text_sequences.pack": "not looked at yet",
    "fused_norm.convergence.text_sequences.training_order": "not looked at yet",
    "fused_norm.convergence.text_sequences.varied": "not looked at yet",
    "fused_norm.convergence.tiers.TIERS": "not looked at yet",
    "fused_norm.convergence.tiers.TrainingOptions": "not looked at yet",
    "fused_norm.convergence.training.RunRecord": "not looked at yet",
    "fused_norm.convergence.training.masked_labels": "not looked at yet",
    "fused_norm.convergence.training.train": "not looked at yet",
    "fused_norm.convergence.verdict.ComparisonResult": "not looked at yet",
    "fused_norm.convergence.verdict.MEASURES": "not looked at yet",
    "fused_norm.convergence.verdict.judge": "not looked at yet",
    "fused_norm.kernels.autocast.autocast_dtype": "not looked at yet",
    "fused_norm.kernels.autocast.set_autocast": "not looked at yet",
    "fused_norm.kernels.codegen": "not looked at yet",
    "fused_norm.kernels.codegen.Cuda": "not looked at yet",
    "fused_norm.kernels.codegen._launch_line": "not looked at yet",
    "fused_norm.kernels.fp8.formats.cast_groups": "not looked at yet",
    "fused_norm.kernels.fp8.kernels": "not looked at yet",
    "fused_norm.kernels.fp8.kernels._casts_to_fp8": "not looked at yet",
    "fused_norm.kernels.fp8.kernels.codes_of": "not looked at yet",
    "fused_norm.kernels.fp8.kernels.empty_norm_fp8": "not looked at yet",
    "fused_norm.kernels.fp8.kernels.launch_norm_fp8": "not looked at yet",
    "fused_norm.kernels.fp8.kernels.scale_of": "not looked at yet",
    "fused_norm.kernels.fp8.operators.NORM_FP8": "not looked at yet",
    "fused_norm.kernels.operator": "not looked at yet",
    "fused_norm.kernels.operator.BackwardCall": "not looked at yet",
    "fused_norm.kernels.operator.OPERATORS": "not looked at yet",
    "fused_norm.kernels.operator.Recompute": "not looked at yet",
    "fused_norm.kernels.operator.calls": "not looked at yet",
    "fused_norm.kernels.operator.force_fused_in_graphs": "not looked at yet",
    "fused_norm.kernels.operator.norm_spec": "not looked at yet",
    "fused_norm.kernels.plans": "not looked at yet",
    "fused_norm.kernels.plans.BackwardPlan": "not looked at yet",
    "fused_norm.kernels.plans.Device": "not looked at yet",
    "fused_norm.kernels.plans.ForwardPlan": "not looked at yet",
    "fused_norm.kernels.plans.HeadsTile": "not looked at yet",
    "fused_norm.kernels.plans.MODES": "not looked at yet",
    "fused_norm.kernels.plans.Mode": "not looked at yet",
    "fused_norm.kernels.plans.PlanTable": "not looked at yet",
    "fused_norm.kernels.plans.RULES": "not looked at yet",
    "fused_norm.kernels.plans.Rule": "not looked at yet",
    "fused_norm.kernels.plans.TABLES": "not looked at yet",
    "fused_norm.kernels.plans.WIDEST_BACKWARD": "not looked at yet",
    "fused_norm.kernels.plans.WIDEST_FORWARD": "not looked at yet",
    "fused_norm.kernels.plans.WIDEST_GATED": "not looked at yet",
    "fused_norm.kernels.plans.WIDEST_SANDWICH_BACKWARD": "not looked at yet",
    "fused_norm.kernels.plans.WIDEST_SANDWICH_FORWARD": "not looked at yet",
    "fused_norm.kernels.plans.backward_plan": "not looked at yet",
    "fused_norm.kernels.plans.conv_plan": "not looked at yet",
    "fused_norm.kernels.plans.forward_plan": "not looked at yet",
    "fused_norm.kernels.plans.glu_plan": "not looked at yet",
    "fused_norm.kernels.plans.heads_backward_plan": "not looked at yet",
    "fused_norm.kernels.plans.heads_forward_plan": "not looked at yet",
    "fused_norm.kernels.plans.next_power_of_2": "not looked at yet",
    "fused_norm.kernels.plans.table_of": "not looked at yet",
    "fused_norm.kernels.recording": "not looked at yet",
    "fused_norm.kernels.recording.forget_all": "not looked at yet",
    "fused_norm.kernels.reference": "not looked at yet",
    "fused_norm.kernels.reference.NormFunctions": "not looked at yet",
    "fused_norm.kernels.reference.add_rms_norm": "not looked at yet",
    "fused_norm.kernels.reference.cast_output": "not looked at yet",
    "fused_norm.kernels.reference.expert_gate": "not looked at yet",
    "fused_norm.kernels.reference.linear_cross_entropy": "not looked at yet",
    "fused_norm.kernels.reference.rms_norm": "not looked at yet",
    "fused_norm.kernels.triton.conv_kernels": "not looked at yet",
    "fused_norm.kernels.triton.conv_kernels.conv_plan": "not looked at yet",
    "fused_norm.kernels.triton.cross_entropy_kernels.launch_multiply": "not looked at yet",
    "fused_norm.kernels.triton.devices": "not looked at yet",
    "fused_norm.kernels.triton.devices._hardware_of": "not looked at yet",
    "fused_norm.kernels.triton.devices.use_plans": "not looked at yet",
    "fused_norm.kernels.triton.language.TRITON_DTYPES": "not looked at yet",
    "fused_norm.kernels.triton.language.round_to": "not looked at yet",
    "fused_norm.kernels.triton.language.rows_of": "not looked at yet",
    "fused_norm.kernels.triton.language.values_of": "not looked at yet",
    "fused_norm.kernels.triton.launch.Launch": "not looked at yet",
    "fused_norm.kernels.triton.launch.launches": "not looked at yet",
    "fused_norm.kernels.triton.lora_kernels": "not looked at yet",
    "fused_norm.kernels.triton.memory": "not looked at yet",
    "fused_norm.kernels.triton.memory.is_long": "not looked at yet",
    "fused_norm.kernels.triton.norm_backward": "not looked at yet",
    "fused_norm.kernels.triton.norm_forward": "not looked at yet",
    "fused_norm.kernels.triton.qk_launch": "not looked at yet",
    "fused_norm.patcher.activation_recognition": "not looked at yet",
    "fused_norm.patcher.activation_recognition.FORMULAS": "not looked at yet",
    "fused_norm.patcher.activation_recognition._formula_of": "not looked at yet",
    "fused_norm.patcher.activation_recognition.recognise_activation": "not looked at yet",
    "fused_norm.patcher.adapters": "not looked at yet",
    "fused_norm.patcher.adapters.AdapterInput": "not looked at yet",
    "fused_norm.patcher.adapters.FusedAdapter": "not looked at yet",
    "fused_norm.patcher.adapters.dropout_factors": "not looked at yet",
    "fused_norm.patcher.adapters.mask_of_dropout": "not looked at yet",
    "fused_norm.patcher.adapters.why_stock": "not looked at yet",
    "fused_norm.patcher.apply": "not looked at yet",
    "fused_norm.patcher.attention_functions": "not looked at yet",
    "fused_norm.patcher.attention_functions._reader_of": "not looked at yet",
    "fused_norm.patcher.attention_functions.read_dtype": "not looked at yet",
    "fused_norm.patcher.four_bit": "not looked at yet",
    "fused_norm.patcher.fused_block": "not looked at yet",
    "fused_norm.patcher.fused_block.FusedBlock": "not looked at yet",
    "fused_norm.patcher.fused_block.Rewrite": "not looked at yet",
    "fused_norm.patcher.fused_block.run_fused": "not looked at yet",
    "fused_norm.patcher.fused_classes": "not looked at yet",
    "fused_norm.patcher.fused_classes._MOST_VARIANTS": "not looked at yet",
    "fused_norm.patcher.fused_classes.rewritten_forward": "not looked at yet",
    "fused_norm.patcher.fused_experts": "not looked at yet",
    "fused_norm.patcher.fused_experts._EXPERTS": "not looked at yet",
    "fused_norm.patcher.fused_experts._agrees": "not looked at yet",
    "fused_norm.patcher.fused_experts.cpu_replica": "not looked at yet",
    "fused_norm.patcher.fused_experts.reference": "not looked at yet",
    "fused_norm.patcher.fused_norm_module": "not looked at yet",
    "fused_norm.patcher.fused_norm_module._warned": "not looked at yet",
    "fused_norm.patcher.fused_norm_module.is_disabled": "not looked at yet",
    "fused_norm.patcher.lazy_logits.CrossEntropy": "not looked at yet",
    "fused_norm.patcher.lazy_logits.LazyLogits": "not looked at yet",
    "fused_norm.patcher.lazy_logits.Projection": "not looked at yet",
    "fused_norm.patcher.linear_inputs": "not looked at yet",
    "fused_norm.patcher.losses": "not looked at yet",
    "fused_norm.patcher.losses.FusedHead": "not looked at yet",
    "fused_norm.patcher.losses.LossCall": "not looked at yet",
    "fused_norm.patcher.native_code.native_code": "not looked at yet",
    "fused_norm.patcher.norm_recognition": "not looked at yet",
    "fused_norm.patcher.norm_recognition._compare_with_formulas": "not looked at yet",
    "fused_norm.patcher.patterns.functions_of": "not looked at yet",
    "fused_norm.patcher.patterns.heads.QK_NAME": "not looked at yet",
    "fused_norm.patcher.patterns.patterns_of": "not looked at yet",
    "fused_norm.patcher.patterns.rewritten_forward": "not looked at yet",
    "fused_norm.patcher.patterns.rotations.ROTATION_NAME": "not looked at yet",
    "fused_norm.patcher.probe.UnrecognisedError": "not looked at yet",
    "fused_norm.patcher.recompute": "not looked at yet",
    "fused_norm.patcher.recompute._Recomputable": "not looked at yet",
    "fused_norm.patcher.recompute.call_recomputing": "not looked at yet",
    "fused_norm.patcher.recompute_linears": "not looked at yet",
    "fused_norm.patcher.recompute_linears.LinearOutputs": "not looked at yet",
    "fused_norm.patcher.recompute_linears.Recipe": "not looked at yet",
    "fused_norm.patcher.recompute_linears._linear": "not looked at yet",
    "fused_norm.patcher.recompute_linears._linear_in_4_bits": "not looked at yet",
    "fused_norm.patcher.recompute_linears._with_adapter": "not looked at yet",
    "fused_norm.patcher.rotation_recognition.full_cos_sin": "not looked at yet",
    "fused_norm.patcher.rotation_recognition.half_cos_sin": "not looked at yet",
    "fused_norm.patcher.rotation_recognition.indexed_cos_sin": "not looked at yet",
    "fused_norm.patcher.rotation_recognition.mrope_cos_sin": "not looked at yet",
    "fused_norm.patcher.rotation_recognition.recognise_rotation": "not looked at yet",
    "fused_norm.patcher.running_code.RunningCode": "not looked at yet",
    "fused_norm.patcher.source.Helper": "not looked at yet",
    "fused_norm.patcher.source.SourceError": "not looked at yet",
    "fused_norm.patcher.source.helpers_of": "not looked at yet",
    "fused_norm.patcher.source.source_of": "not looked at yet",
    "fused_norm.patcher.survey.looks_like_norm": "not looked at yet",
    "fused_norm.spec.CASTINGS": "not looked at yet",
    "fused_norm.spec.GatedNormSpec": "not looked at yet",
    "fused_norm.spec.KINDS": "not looked at yet",
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
