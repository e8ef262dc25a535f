"""The package ``kernels`` loads the export for the kernels hub, which gives norms the bits of stock."""

import copy
import importlib
import re
import shutil
from types import MethodType

import pytest
import torch
from torch import nn
from transformers.utils.import_utils import is_kernels_available

import fused_norm
from fused_norm.model_configs import build
from tools.hub_export.command import export, main

from ..patcher.models import assert_gradients_near, step, tokens


def test_an_export_imports_only_what_is_in_it(tmp_path, monkeypatch):
    folder = export(tmp_path / "made" / "here")
    sources = {path: path.read_text() for path in folder.rglob("*.py")}
    assert {"spec.py", "norm.py", "norm_kernels.py", "layers.py"} <= {path.name for path in sources}
    assert not re.findall(r"^\s*(?:from|import) fused_norm\b.*", "\n".join(sources.values()), re.MULTILINE)
    shutil.copytree(folder, tmp_path / "exported_alone")
    monkeypatch.syspath_prepend(tmp_path)
    for path in sources:
        importlib.import_module(".".join(["exported_alone", *path.relative_to(folder).with_suffix("").parts]))


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
    stock = build("olmo2", seed=0).model.norm.to(device)
    norm = copy.deepcopy(stock)
    norm.forward = MethodType(layers.RMSNorm.forward, norm)
    x = torch.randn(3, *stock.weight.shape, device=device)
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


def kernelized(stock, mapping, mode=None):
    import kernels

    model = copy.deepcopy(stock)
    with kernels.use_kernel_mapping(mapping), pytest.warns(UserWarning, match="No kernel mapping found"):
        return kernels.kernelize(model, mode=mode or kernels.Mode.TRAINING, device=model.device.type)


def replaced(model):
    """Return the class names of the modules that an exported layer replaces."""
    patched = [module for module in model.modules() if "forward" in vars(module)]
    return {type(module).__name__ for module in patched if module.forward.__func__.__module__.endswith(".layers")}


@pytest.mark.parametrize(("name", "norm"), [("olmo2", "Olmo2RMSNorm"), ("llama", "LlamaRMSNorm")])
def test_kernelized_norms_give_the_bits_of_stock_and_its_gradients(name, norm, mapping, device):
    stock = build(name, seed=0, dtype=torch.bfloat16, device=device)
    hub = kernelized(stock, mapping)
    assert replaced(hub) == {norm}
    (expected, stock_gradients), (logits, gradients) = step(stock, tokens(device)), step(hub, tokens(device))
    assert (logits != expected).float().mean() < 0.01
    assert_gradients_near(gradients, stock_gradients, 0.02)


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
