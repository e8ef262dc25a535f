"""The package ``kernels`` loads the export for the kernels hub, which gives norms the bits of stock."""

from __future__ import annotations

import ast
import copy
import importlib
import shutil
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.import_utils import is_kernels_available

import fused_norm
from fused_norm.model_configs import build
from tools.hub_export.command import export, main


def has(base: Path, name: str) -> bool:
    """Return whether ``from base import name`` finds a module, or a name that a file defines."""
    if base.with_suffix(".py").is_file() or (base / f"{name}.py").is_file() or (base / name).is_dir():
        return True
    return name in (base / "__init__.py").read_text()


def test_an_export_imports_nothing_of_the_package_but_what_is_in_it(tmp_path):
    folder = export(tmp_path / "made" / "here")
    files = sorted(folder.rglob("*.py"))
    assert {"spec.py", "norm.py", "norm_backward.py", "layers.py"} <= {path.name for path in files}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("fused_norm")], path
            elif isinstance(node, ast.ImportFrom):
                assert node.level or not node.module.startswith("fused_norm"), path
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                missing = [alias.name for alias in node.names if node.level and not has(base, alias.name)]
                assert not missing, f"{path}: {missing}"


def test_the_command_writes_nothing_over_and_says_what_to_do(tmp_path, capsys):
    assert main([str(tmp_path / "out")]) == 0
    metadata = tmp_path / "out" / "build" / "torch-universal" / "metadata.json"
    before = metadata.stat().st_mtime_ns
    assert main([str(tmp_path / "out")]) == 2
    assert "torch-universal is there already: remove it, or name another folder" in capsys.readouterr().err
    assert metadata.stat().st_mtime_ns == before


def test_an_exported_layer_imported_by_itself_computes_what_stock_does_by_operators_of_its_own(
    tmp_path, device, monkeypatch
):
    shutil.copytree(export(tmp_path / "out"), tmp_path / "exported_norm")
    monkeypatch.syspath_prepend(tmp_path)
    layers = importlib.import_module("exported_norm").layers
    operator = layers.RMS_NORM
    assert operator is not fused_norm.kernels.rms_norm.__globals__["RMS_NORM"]
    stock = olmo2(torch.float32).model.norm.to(device)
    norm = copy.deepcopy(stock)
    norm.forward = MethodType(layers.RMSNorm.forward, norm)
    x = torch.randn(3, 64, device=device)
    calls = []
    monkeypatch.setattr(operator, "forward", lambda *a, _run=operator.forward, **k: calls.append(a) or _run(*a, **k))
    torch.testing.assert_close(norm(x), stock(x), rtol=1e-6, atol=1e-6)
    assert len(calls) == 1, "the norm's own forward ran"


@pytest.fixture(scope="module")
def mapping(tmp_path_factory):
    reason = "needs `kernels`, 0.16 or newer, in a version that transformers accepts"
    kernels = pytest.importorskip("kernels", minversion="0.16", reason=reason)
    if not is_kernels_available():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hub")
    export(folder)
    layer = kernels.LocalLayerRepository(folder, layer_name="RMSNorm")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: {device: {kernels.Mode.TRAINING: layer}} for name in ("RMSNorm", "RMSNormZeroCentered")}


def kernelized(stock: nn.Module, mapping: Any, mode: Any = None) -> nn.Module:
    import kernels

    model = copy.deepcopy(stock)
    with kernels.use_kernel_mapping(mapping), pytest.warns(UserWarning, match="No kernel mapping found"):
        return kernels.kernelize(model, mode=mode or kernels.Mode.TRAINING, device=model.device.type)


def replaced(model: nn.Module) -> set[str]:
    """Return the class names of the modules that an exported layer replaces."""
    patched = [module for module in model.modules() if "forward" in vars(module)]
    return {type(module).__name__ for module in patched if module.forward.__func__.__module__.endswith(".layers")}


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(0, 256, (2, 11), generator=torch.Generator().manual_seed(1)).to(model.device)
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def olmo2(dtype: torch.dtype) -> nn.Module:
    """Its norms are marked as Llama's are, and round in another place."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("olmo2", vocab_size=264, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            nn.init.normal_(module.weight, 1.0, 0.3)
    return model.train()


@pytest.mark.parametrize(("name", "norm"), [("olmo2", "Olmo2RMSNorm"), ("llama", "LlamaRMSNorm")])
def test_kernelized_norms_give_the_bits_of_stock_and_its_gradients(name, norm, mapping, device):
    dtype = torch.bfloat16
    stock = olmo2(dtype).to(device) if name == "olmo2" else build(name, seed=0, dtype=dtype, device=device)
    hub = kernelized(stock, mapping)
    assert replaced(hub) == {norm}
    (expected, stock_gradients), (logits, gradients) = step(stock), step(hub)
    assert (logits != expected).float().mean() < 0.01
    for key, gradient in stock_gradients.items():
        assert (gradients[key] - gradient).float().norm() <= 0.02 * gradient.float().norm(), key


def test_a_module_that_computes_something_else_keeps_its_forward(mapping, device):
    class Halved(type(build("llama", seed=0).model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) / 2

    model = nn.Sequential(Halved(32)).to(device)
    x = torch.randn(3, 32, device=device)
    import kernels

    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device=x.device.type)
    assert replaced(model) == {"Halved"}
    assert torch.equal(model(x), Halved(32).to(device)(x))


def test_for_compiled_graphs_stock_stays(mapping):
    import kernels

    stock = build("llama", seed=0)
    assert replaced(kernelized(stock, mapping, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)) == set()
    compiled = torch.compile(kernelized(stock, mapping).model.norm, fullgraph=True, backend="eager")
    x = torch.randn(2, 3, stock.config.hidden_size)
    assert torch.equal(compiled(x), stock.model.norm(x))
