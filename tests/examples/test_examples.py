"""Every example runs at a tiny size on a local checkpoint, with the results of stock."""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fused_norm
from fused_norm.spec import NormSpec

from ..patcher.ranks import called_operators
from .checkpoints import save_checkpoint, save_vision_language_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"

CLOSE = {"rtol": 1e-4, "atol": 1e-4} if not torch.cuda.is_available() else {"rtol": 1e-2, "atol": 1e-2}
"""On a GPU the examples train under autocast to bf16."""


def example(name):
    """Import an example; its ``main`` takes the arguments of the command line."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):  # as Python does for a script
        return importlib.import_module(name)


def fused_and_stock(name, arguments):
    """Run an example fused, and then with the stock code."""
    main = example(name).main
    fused = main(arguments)
    with fused_norm.disabled():
        return fused, main(arguments)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return str(save_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3")))


@pytest.fixture
def called():
    with called_operators() as names:
        yield names


def test_a_norm_and_a_layer_of_ones_own_are_fused_by_what_they_compute(called):
    report, different = example("own_norm").main()
    assert report.counts == dict.fromkeys(report.counts, 0) | {"norm": 4, "residual": 2, "mlp": 2}
    assert {site.spec for site in report.fused if site.spec} == {NormSpec("gemma", zero_centered=True, eps=1e-6)}
    assert Counter(called) == {"rms_norm": 2, "add_rms_norm": 2, "glu": 2}
    assert different < 0.01


def test_the_operators_alone_have_values_and_gradients(called):
    x, weight, outputs = example("operators").main()
    assert Counter(called) == {"rms_norm": 2, "add_rms_norm": 1, "norm_add_norm": 1, "qk_norm": 1, "glu": 1}
    for y in outputs.values():
        assert y.dtype == torch.bfloat16
        assert y.float().std() > 0.1
    expected = weight * torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype)
    assert (outputs["rms_norm"] != expected).float().mean() < 0.01
    assert 0 < weight.grad.float().norm() < torch.inf


def assert_trains_as_stock(name, checkpoint, folder, length, called, *options, names=("loss",), close=CLOSE):
    """Examples that use a Trainer run one step stock and two fused, and log what stock logs."""
    arguments = ["--model", checkpoint, "--output", str(folder), "--steps", "3", "--length", length, *options]
    fused, stock = (
        torch.tensor([[row[name] for name in names] for row in trainer.state.log_history if "loss" in row])
        for trainer in fused_and_stock(name, arguments)
    )
    assert called.count("add_rms_norm") > 0
    assert len(fused) == 3
    torch.testing.assert_close(fused, stock, **close)


@pytest.mark.slow
def test_the_trainer_takes_the_steps_of_stock_and_saves_a_stock_model(checkpoint, called, tmp_path):
    assert_trains_as_stock("train_with_trainer", checkpoint, tmp_path, "16", called)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.state_dict().keys() == AutoModelForCausalLM.from_pretrained(checkpoint).state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "bits"), [("sft", 4), ("dpo", 16)])
def test_trl_trains_adapters_as_stock_does(method, bits, checkpoint, called, tmp_path):
    pytest.importorskip("trl", reason="needs trl")
    if bits == 4:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    assert_trains_as_stock(
        "train_with_trl", checkpoint, tmp_path, "48", called, "--method", method, "--bits", str(bits)
    )
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a rounding may choose another token to sample")
def test_trl_samples_and_rewards_as_stock_does(checkpoint, called, tmp_path):
    """The loss of such a step is zero except for roundings, whatever its gradient.

    Gradients of logits are rounded to bf16 before they are multiplied by those of log-probabilities, TRL's after it.
    """
    pytest.importorskip("trl", reason="needs trl")
    names = ("reward", "reward_std", "grad_norm")
    options, close = ("--method", "grpo"), {"rtol": 2**-8, "atol": 1e-4}
    assert_trains_as_stock("train_with_trl", checkpoint, tmp_path, "8", called, *options, names=names, close=close)
    assert "linear_log_probs" in called


@pytest.mark.slow
def test_a_loop_with_compiled_layers_takes_the_steps_of_stock_and_says_which_steps_are(
    checkpoint, large_graphs, capsys
):
    arguments = ["--model", checkpoint, "--steps", "3", "--length", "16", "--backend", "aot_eager"]
    fused, stock = fused_and_stock("train_loop", arguments)
    assert len(fused) == 3
    assert fused == pytest.approx(stock, rel=CLOSE["rtol"])
    printed = re.findall(r"^step(s .*?:.{6}| \d)", capsys.readouterr().out, re.MULTILINE)
    assert printed[:5] == ["s 1 to 1: stock", " 1", "s 2 to 3: fused", " 2", " 3"]


@pytest.mark.slow
def test_generation_gives_the_text_of_stock(checkpoint, called):
    fused, stock = fused_and_stock("generate", ["--model", checkpoint, "--tokens", "5", "--prompt", "a prompt"])
    assert called.count("add_rms_norm") == 5 * 2
    assert fused.startswith("a prompt")
    assert fused == stock


@pytest.mark.slow
def test_a_vision_language_model_answers_as_stock(called, tmp_path):
    folder = str(save_vision_language_checkpoint(tmp_path))
    fused, stock = fused_and_stock("vision_language", ["--model", folder, "--tokens", "3"])
    assert called.count("norm_add_norm") == 3 * 3
    assert fused
    assert fused == stock


def stock_losses_of_two_ranks(checkpoint, length):
    """Return the mean losses of two stock steps, each on two rows of the text of ``train_with_fsdp2``."""
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = torch.tensor(tokenizer((EXAMPLES / "train_with_fsdp2.py").read_text()).input_ids)
    optimizer, losses = torch.optim.AdamW(model.train().parameters(), lr=1e-5), []
    for rows in tokens[: 4 * length].view(2, 2, length):
        loss = sum(model(input_ids=row[None], labels=row[None]).loss for row in rows) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="accelerate shards on GPUs alone: needs two")
def test_two_processes_with_fsdp2_take_the_steps_of_stock(checkpoint, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(fused_norm.__file__).parents[1])}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "fsdp2.yaml"]
    command += ["--mixed_precision", "no", "--main_process_port", "0", EXAMPLES / "train_with_fsdp2.py"]
    command += ["--model", checkpoint, "--output", tmp_path, "--steps", "2", "--length", "16"]
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "fused 5 norm, 4 qk, 2 rope, 2 residual, 2 mlp, 1 loss;\n  kept 0\n" in process.stdout
    assert "kernels do not run" not in process.stderr
    printed = [float(loss) for loss in re.findall(r"loss (\S+)", process.stdout)]
    assert printed == pytest.approx(stock_losses_of_two_ranks(checkpoint, 16), rel=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.state_dict().keys() == AutoModelForCausalLM.from_pretrained(checkpoint).state_dict().keys()


@pytest.mark.slow
def test_the_notebook_runs_and_is_stored_without_outputs(checkpoint):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    import nbformat

    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    environment = os.environ | {"PYTHONPATH": str(Path(fused_norm.__file__).parents[1]), "MODEL": checkpoint}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(env=environment)
    report, compared, chosen, restored = (
        "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")
        for cell in cells[2:]
    )
    assert "fused 5 norm, 4 qk, 2 rope, 2 residual, 2 mlp, 1 loss;\n  kept 0\n" in report
    numbers = re.search(r"loss (\S+), stock loss (\S+); .* (\S+) apart", compared).groups()
    fused, stock, difference = map(float, numbers)
    assert fused == pytest.approx(stock, rel=1e-2)
    assert difference < 0.05
    assert "fused 2 norm, 2 qk, 1 rope, 1 residual; kept" in chosen
    assert re.search(r"[1-9]\d* modules restored", restored)
