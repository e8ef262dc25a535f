"""``fused-norm converge`` names what it cannot use, keeps its results, and returns the documented exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, PreTrainedTokenizerFast

import fused_norm
from fused_norm.cli import main
from fused_norm.model_configs import build, tiny_config

from ..conftest import HAS_GPU, slow_rows

QUICK = ("--steps", "2", "--dtype", "fp32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen4"], "no family 'qwen4'; there are llama,"),
        (["llama", "--data", "{}/absent"], "there is no file or directory"),
        (["llama", "--data", "{}/short.txt"], "the text has 12 tokens, and one sequence takes 33"),
        (["llama", "--data", "{}/short.txt", "--length", "12"], "fills 1 varied sequences of 12 tokens, and one step"),
        (["llama", "--data", "{}/bad"], "bad is not UTF-8"),
        (["llama", "--data", "{}/rows"], "no column 'text'; it has body"),
        (["llama", "--data", "{}/rows", "--column", "body"], "the text has 8 tokens, and one sequence takes 33"),
        (["llama", "--data", "{}/taken"], "cannot load the dataset"),
        (["--config", "{}"], "has no config.json"),
        (["--config", "t5"], "is no causal language model (t5)"),
        (["llama", "--config", "llama"], "two models are called llama"),
        pytest.param(
            ["llama", "--axis", "graphs"],
            "--axis graphs says nothing here: there is no CUDA device",
            marks=pytest.mark.skipif(HAS_GPU, reason="there layers are replayed"),
        ),
        (["llama", "--out", "{}/short.txt/below"], "/short.txt/below cannot be written (Not a directory)"),
        *slow_rows((["llama", "--out", "{}/taken"], "/taken/report.json cannot be written (Is a directory)")),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_code_two(arguments, message, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("hello world\n")
    (tmp_path / "bad").write_bytes(b"caf\xe9\n")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"body": "eins"}\n{"body": "zwei"}\n')
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    line = [argument.format(tmp_path) for argument in arguments]
    assert main(["converge", *QUICK, "--out", str(tmp_path / "out"), *line]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fused-norm converge: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("line", ["--device cuda", "--tier full"])
def test_a_gpu_that_is_not_there_is_named(line, capsys):
    assert main(["converge", "llama", *line.split()]) == 2
    assert "device 'cuda' cannot be used" in (error := capsys.readouterr().err) or "is for a GPU" in error


def test_a_config_without_norms_is_invalid(tmp_path, capsys):
    GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=264).save_pretrained(tmp_path / "gpt2")
    assert main(["converge", "--config", str(tmp_path / "gpt2"), *QUICK, "--out", str(tmp_path / "out")]) == 2
    assert "GPT2LMHeadModel has no norm that can be fused" in capsys.readouterr().out


def test_a_training_ends_at_a_loss_that_is_not_a_number_and_is_invalid(tmp_path, capsys):
    assert main(["converge", "llama", *QUICK, "--steps", "4", "--learning-rate", "1e30", "--out", str(tmp_path)]) == 2
    assert "the stock run is not finite in step 1: lower the learning rate" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_of_the_users_own_is_trained_with_its_weights_and_tokens(tmp_path, capsys):
    words = ["?", "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "mine")
    build(tiny_config("gemma", vocab_size=12), seed=0).save_pretrained(tmp_path / "mine")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(words[1:]) * 60)
    arguments = ["converge", "--config", str(tmp_path / "mine"), "--data", str(text), "--out", str(tmp_path), *QUICK]
    assert main(arguments) == 0
    (row,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert row["name"] == "mine.fp32.eager.all.seed0"
    some = {"norm": 5, "rope": 2, "residual": 2, "mlp": 2, "loss": 1, "shared_inputs": 4}
    assert {kind: count for kind, count in row["fused"]["sites"].items() if count} == some
    assert main([*arguments, "--tokenizer", "bytes"]) == 2
    assert "mine has 12 tokens, too few for bytes" in capsys.readouterr().err


@pytest.mark.slow
def test_unit_weights_are_no_test(tmp_path, capsys):
    build("llama", seed=0, norm_std=0.0).save_pretrained(tmp_path / "unit")
    assert main(["converge", "--config", str(tmp_path / "unit"), *QUICK, "--out", str(tmp_path / "out")]) == 2
    assert "started as one number throughout" in capsys.readouterr().out


class Bar:
    """Counts the updates of a progress bar, and stops the command at one of them."""

    def __init__(self, total, *, stop=None, **named):
        self.total, self.done, self.stop = total, 0, stop

    def update(self):
        self.done += 1
        if self.done == self.stop:
            raise KeyboardInterrupt

    def set_description(self, text):
        pass

    clear = close = lambda self: None


@pytest.mark.slow
def test_a_run_that_is_stopped_says_what_it_has_and_goes_on_from_there(tmp_path, capsys, monkeypatch):
    arguments = ["converge", "llama", "gemma", *QUICK, "--out", str(tmp_path)]
    monkeypatch.setattr("tqdm.tqdm", partial(Bar, stop=13))
    assert main(arguments) == 130
    assert "stopped with 1 of 2 comparisons done" in capsys.readouterr().out
    assert "Not known: 1 of 2 comparisons said nothing" in (tmp_path / "report.html").read_text()
    bars = []
    monkeypatch.setattr("tqdm.tqdm", lambda **named: bars.append(Bar(**named)) or bars[0])
    assert main(arguments) == 0
    assert "Llama, fp32, eager  (from an earlier run)" in capsys.readouterr().out
    # Two steps of a stock run, four controls and a fused run each; the kept comparison runs none.
    assert (bars[0].total, bars[0].done) == (12, 12)
    assert {path.name for path in tmp_path.iterdir()} == {"comparisons", "report.html", "report.json"}


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path, capsys):
    line = ["converge", "llama", *QUICK, "--device", "cpu", "--seeds", "2"]
    reports = {}
    for jobs in ("1", "2"):
        assert main([*line, "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
        numbers = json.loads((tmp_path / jobs / "report.json").read_text())["results"]
        reports[jobs] = re.sub(r'"seconds_per_step": [^,}]*', "", json.dumps(numbers))
    assert reports["2"] == reports["1"]
    assert main([*line, "--jobs", "2", "--out", str(tmp_path / "2")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("from an earlier run") == 2
    assert ", 2 processes share the comparisons" in printed


@pytest.mark.slow
def test_a_wrong_kernel_is_exit_code_one(tmp_path, capsys, wrong_where_fused):
    assert main(["converge", "llama", *QUICK, "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "red: Llama, fp32, eager" in out
    assert "diverges first in model.layers.0, backward: model.layers.0.input_layernorm" in out


def start(*arguments):
    """Start a command with a pipe as its output, as the leader of a process group."""
    environment = os.environ | {"PYTHONPATH": str(Path(fused_norm.__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "fused_norm", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def test_a_piped_demo_says_something_before_it_loads_torch_and_ctrl_c_then_ends_it_in_a_line(tmp_path):
    with start("demo", "--out", tmp_path / "demo") as demo:
        assert demo.stdout.readline().startswith("loading torch")
        assert "torch/lib" not in Path(f"/proc/{demo.pid}/maps").read_text()
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.communicate(timeout=60) == ("", "fused-norm demo: stopped\n")
        assert demo.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_is_answered_by_one_process_of_several(tmp_path):
    with start("converge", "llama", "gemma", *QUICK, "--jobs", "2", "--out", tmp_path) as run:
        assert any(line.startswith("plan:") for line in run.stdout)
        time.sleep(5)  # the others import torch, or are running
        os.killpg(run.pid, signal.SIGINT)
        out, error = run.communicate(timeout=60)
    assert "Traceback" not in out + error
    assert re.fullmatch(r"stopped with 0 of 2 comparisons done; the same command goes on from there\n", out)
    assert run.returncode == 130


@pytest.mark.slow
def test_processes_that_are_killed_are_called_so(tmp_path):
    with start("converge", "llama", "gemma", *QUICK, "--device", "cpu", "--jobs", "2", "--out", tmp_path) as run:
        assert any(line.startswith("plan:") for line in run.stdout)
        time.sleep(5)
        for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        out, _ = run.communicate(timeout=60)
    assert "its process was killed" in out
    assert run.returncode == 2


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("accelerate", ["converge", "llama"]),
        ("matplotlib", ["demo", "llama"]),
        ("datasets", ["converge", "llama", "--data", "owner/texts"]),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(module, command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(command) == 2
    assert f"needs {module}: pip install 'fused-norm[convergence]'" in capsys.readouterr().err


@pytest.fixture
def planned(monkeypatch, tmp_path, capsys):
    """Return a function that stops a command at its progress bar, and returns what it has printed until then."""

    def run(*arguments):
        monkeypatch.setattr("tqdm.tqdm", interrupt)
        assert main(["converge", *arguments, "--out", str(tmp_path)]) == 130
        return capsys.readouterr().out

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    return run


def test_text_files_need_no_datasets_package(planned, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for text in ([], ["--data", __file__]):
        assert "plan:   1 comparison," in planned("llama", *QUICK, *text)


def test_without_peft_adapters_are_left_out_unless_they_are_asked_for(planned, capsys, monkeypatch):
    counts = []
    for _ in range(2):
        counts.append(int(re.search(r"plan: +(\d+) comparisons", planned("qwen3"))[1]))
        monkeypatch.setitem(sys.modules, "peft", None)
    assert 7 < counts[1] < counts[0]
    assert main(["converge", "qwen3", "--axis", "eager", "--axis", "lora-dropout"]) == 2
    assert capsys.readouterr().err == "fused-norm converge: --axis lora-dropout needs peft: pip install peft\n"


@pytest.mark.slow
def test_the_demo_trains_three_families_compares_and_draws(tmp_path, capsys):
    assert main(["demo", "--steps", "5", "--out", str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    assert "source of the standard library" in out
    if not torch.cuda.is_available():  # before it begins
        assert re.search(r"^time: +about \d+ (s|minutes), by two steps .*\n.*green", out, re.MULTILINE)
    assert "No difference beyond rounding noise in 5 steps: 3 of 3 comparisons\n" in out
    for family in ("Qwen3", "Llama", "Gemma"):
        assert re.search(rf"^green +{family}, bf16 autocast, eager +\d", out, re.MULTILINE)
    rows = json.loads((tmp_path / "new" / "folder" / "report.json").read_text())["results"]
    assert [len(row["fused"]["losses"]) for row in rows] == [5, 5, 5]
    assert "<svg" in (tmp_path / "new" / "folder" / "report.html").read_text()
