"""What docs/extending.md adds is whole: a family has green tests, and an activation and a pattern are fused."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fused_norm

from .markdown_pages import ROOT, blocks_of

SUITES = (
    "tests/model_configs",
    "tests/patcher/test_apply.py",
    "tests/patcher/test_newer_families.py",
    "tests/patcher/test_patched_models.py",
    "tests/check",
)


@pytest.mark.slow
def test_the_families_of_the_page_pass_the_tests_that_go_over_the_table():
    source = Path(fused_norm.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "tests.docs.families_of_the_page"]
    command += ["-p", "no:cacheprovider", "-k", "phi3 or qwen3_next", *SUITES]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:]
    passed = re.findall(r"^PASSED (\S+)", run.stdout, re.MULTILINE)
    assert len(passed) >= 20
    assert [suite for suite in SUITES if not any(test.startswith(suite) for test in passed)] == []


def apply_diff(diff, package):
    """Apply a diff of the page: a file by its name, lines that occur once in it, and what is added after them."""
    for part in re.split(r"^ # (?=\S+\.py: )", diff, flags=re.MULTILINE)[1:]:
        first, *changes = part.splitlines()
        path = package / first.partition(":")[0]
        lines, place = path.read_text(encoding="utf-8").splitlines(), None
        for mark, line in ((change[0], change[1:]) for change in changes if change):
            if mark == "+":
                lines.insert(place, line)
            else:
                assert lines.count(line) == 1, f"{path.name} has other lines than {line!r}"
                place = lines.index(line)
            if mark == "-":
                del lines[place]
            else:
                place += 1
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


FUSED = """
import copy

import torch
from torch import nn
from transformers import AutoConfig

import fused_norm
from fused_norm.model_configs import FAMILIES, build


class Mlp(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act, self.gate, self.up, self.down = act, nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(self.act(self.gate(x)).mul(self.up(x)))


def results(model, *arguments, **named):
    y = model(*arguments, **named)
    y = getattr(y, "logits", y)
    return y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))


config = AutoConfig.for_model("llama", **FAMILIES["llama"].tiny | {"hidden_act": "relu2"})
model = build(config, seed=0)
stock = copy.deepcopy(model)
report = fused_norm.apply_fused_norm(model)
print({row.activation for row in report.fused if row.kind == "mlp"}, report.kept)
tokens = torch.arange(10).view(2, 5)
torch.testing.assert_close(results(model, input_ids=tokens), results(stock, input_ids=tokens), rtol=1e-4, atol=1e-4)

torch.manual_seed(0)
model = nn.ModuleList([Mlp(nn.SiLU()), Mlp(nn.ReLU())])
stock, x = copy.deepcopy(model), torch.randn(2, 5, 8)
for row in fused_norm.apply_fused_norm(model).rows:
    print(row.activation, row.reason)
print("gate (silu)" in str(model[0]))
for fused, its_stock in zip(model, stock, strict=True):
    torch.testing.assert_close(results(fused, x), results(its_stock, x))
model[0].act.register_forward_hook(lambda act, arguments, y: 2 * y)
stock[0].act.register_forward_hook(lambda act, arguments, y: 2 * y)
assert torch.equal(model[0](x), stock[0](x))
"""


@pytest.mark.slow
def test_the_activation_and_the_pattern_of_the_page_are_fused_with_no_other_change(tmp_path):
    package = tmp_path / "fused_norm"
    shutil.copytree(Path(fused_norm.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = list(blocks_of((ROOT / "docs" / "extending.md").read_text(encoding="utf-8")))
    (diff,) = (block.text for block in blocks if block.language == "diff")
    apply_diff(diff, package)
    (pattern,) = (block.text for block in blocks if "class GateCall" in block.text)
    patterns = package / "patcher" / "patterns"
    (patterns / "gate_calls.py").write_text(pattern, encoding="utf-8")
    registry = (patterns / "__init__.py").read_text(encoding="utf-8")
    registry = registry.replace("from .gates import", "from .gate_calls import GateCall\nfrom .gates import")
    registry = registry.replace(" Gate, Convolution,", " Gate, GateCall, Convolution,")
    (patterns / "__init__.py").write_text(registry, encoding="utf-8")
    script = tmp_path / "fused.py"
    script.write_text(FUSED, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == [
        "{'relu2'} ()",
        "silu None",
        "None its activation ReLU computes none of silu, gelu, gelu_tanh, gelu_new, relu2",
        "True",
    ]
