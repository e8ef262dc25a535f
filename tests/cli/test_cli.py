"""Every command runs once as a process of its own; further cases run in this process."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import types
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import BertConfig, GPT2Config

import fused_norm
from fused_norm import FuseOptions
from fused_norm.cli import main
from fused_norm.model_configs import FAMILIES, Family, Shape, build, families_here, tiny_config

SITES = FAMILIES["qwen3"].sites()
OTHERS = {"modules", "norm_rounding", "shared_inputs", "recompute", "strict", "cuda_graphs"}
SWITCHES = {field.name for field in fields(FuseOptions)} - OTHERS
SUMMARY = ", ".join(f"{SITES[kind]} {kind}" for kind in ("norm", "qk", "rope", "residual", "mlp"))


def process(*arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with ``arguments`` in a process that imports this package and is offline."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(fused_norm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
    # Users do not set it, so the command has to.
    environment.pop("TRITON_INTERPRET", None)
    environment |= variables
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    build("qwen3", seed=0).save_pretrained(path)
    return path


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and returns its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


LOAD = """
from transformers import AutoModelForCausalLM
from fused_norm.model_configs import tiny_config
model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
"""

LOAD_BERT = """
from transformers import BertConfig, BertModel
BertModel._from_config(BertConfig(hidden_size=12))
"""


COMMANDS = ("inspect", "check", "converge", "run", "demo", "env")
MISSPELT = (
    "",
    *("inspekt", "inspect", "inspect ./none", "inspect none.safetensors", "run", "run no/such.py"),
    *("run -m no_such.module", "check", "check llama --layers 0", "check none.json"),
    *("check llama --no-norms --residual", "converge lama", "converge llama llama", "converge llama --config llama"),
    *("converge llama --config no/such/folder", "converge --data missing.txt", "converge --tokenizer tokenizer.json"),
    *("converge --learning-rate -1e-3", "demo lama", "demo --data texts/missing.jsonl", "demo --learning-rate nan"),
)
"""Lines that are bad input, which commands find without torch and the hub."""


def test_help_and_misspelt_arguments_do_not_import_torch():
    code = f"""
    import sys
    from fused_norm.cli import main
    good = [["--help"], ["--version"], *([command, "--help"] for command in {COMMANDS})]
    bad = [line.split() for line in {MISSPELT}]
    for arguments in (*good, *bad, *([command, "--nope"] for command in {COMMANDS})):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        assert code == (0 if arguments in good else 2), arguments
        assert not {{"torch", "triton", "transformers", "accelerate"}} & set(sys.modules), arguments
    """
    result = process("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr
    assert fused_norm.__version__ in result.stdout
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, "usage: fused-norm") for line in ("", "inspekt", "inspect", "env --nope")),
        ("check llama --layers 0", "argument --layers: '0' is not a whole number from 1 on"),
        ("converge --seeds 1.5", "argument --seeds: '1.5' is not a whole number from 1 on"),
        ("inspect llama --source --json", "not allowed with argument"),
        ("run --recompute train.py", "without a level, before a name, write --recompute=True"),
    ],
)
def test_misspelt_arguments_are_bad_input_and_say_why(line, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert message in capsys.readouterr().err


@pytest.fixture
def inspected(checkpoint, capsys):
    """Return a function that inspects a model ({} is the checkpoint) and returns the printed JSON."""

    def inspect(line):
        assert main(["inspect", *line.format(checkpoint).split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return inspect


ALL = SITES | {"loss": 1}


@pytest.mark.parametrize(
    ("line", "model", "sites"),
    [
        ("{}", "Qwen3ForCausalLM", ALL),
        ("{}/config.json", "Qwen3ForCausalLM", ALL),
        ("{} --no-qk --no-residual --no-mlp --no-loss", "Qwen3ForCausalLM", {"norm": SITES["norm"]}),
        ("{} --modules model.norm --modules lm_head", "Qwen3ForCausalLM", {"norm": 1, "loss": 1}),
        ("llama", "LlamaForCausalLM", FAMILIES["llama"].sites(32) | {"loss": 1}),
    ],
)
def test_inspect_prints_what_would_be_fused_as_json(line, model, sites, inspected):
    report = inspected(line)
    assert report["model"] == model
    assert Counter(site["kind"] for site in report["fused"]) == sites


def test_inspect_tells_which_blocks_get_outputs_of_a_norm_of_their_own_and_which_layers_recompute(inspected):
    assert inspected("{} --no-shared-inputs")["shared_inputs"] == []
    assert len(inspected("{} --shared-inputs")["shared_inputs"]) == 4
    assert "recompute" not in inspected("{}")
    rows = [(row["path"], row["reason"]) for row in inspected("{} --recompute")["recompute"]]
    assert rows == [("model.layers.0", None), ("model.layers.1", None)]


def test_inspect_tells_which_layers_would_be_replayed_here(inspected, checkpoint, capsys):
    assert "graphs" not in inspected("{}")
    assert "graphs" not in inspected("{} --no-cuda-graphs")
    reason = None if torch.cuda.is_available() else "there is no CUDA device"
    rows = [(row["path"], row["reason"]) for row in inspected("{} --cuda-graphs")["graphs"]]
    assert rows == [("model.layers.0", reason), ("model.layers.1", reason)]
    assert main(["inspect", str(checkpoint), "--cuda-graphs"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"; CUDA graphs in {0 if reason else 2} layers" in out
    assert (f"no graphs in Qwen3DecoderLayer: {reason} 2 graphs model.layers.*" in out) == bool(reason)


def test_inspect_prints_the_forwards_that_run(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--source"]) == 0
    out = capsys.readouterr().out
    assert SUMMARY in out
    heads = [line for line in out.splitlines() if line.startswith("# ")]
    assert heads == [f"# model.layers.0{part} and 1 more" for part in ("", ".self_attn", ".mlp")]
    assert "self.fused_norm_add(self.post_attention_layernorm, residual, hidden_states" in out
    assert "attn_output = self.o_proj(attn_output)" in out, "what is not rewritten stands there too"


def test_inspect_exits_1_when_nothing_can_be_fused(tmp_path, capsys):
    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--no-loss"]) == 1
    assert "Bert" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "check"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no config.json"),
        ({"config.json": "{"}, "no config can be read"),
        ({"config.json": '{"model_type": "nosuch"}'}, "nosuch"),
        ({"adapter_config.json": '{"base_model_name_or_path": "some/base"}'}, "name its base model, some/base"),
        ({"adapter_config.json": '{"base_model_name_or_path": null}'}, "which its config does not name"),
    ],
)
def test_a_bad_model_is_one_line_and_exit_code_2(command, content, message, tmp_path, capsys):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    assert main([command, str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()
    (line,) = [line for line in error if line.startswith(f"fused-norm {command}: ")]
    assert message in line
    assert not any("Traceback" in line for line in error)


def test_a_misspelt_model_type_is_answered_by_those_alike(capsys):
    assert main(["inspect", "qwem3"]) == 2
    error = capsys.readouterr().err
    assert re.match(r"fused-norm inspect: there is no model type 'qwem3'; did you mean .*\bqwen3\b", error)
    assert "internet" not in error


@pytest.fixture
def without_network(monkeypatch):
    """Make the hub unreachable. The dictionary has the names that copies were asked for, and may be given copies."""
    copies: dict[str, str | None] = {}

    def unreachable():
        raise ConnectionError

    def copy_of(name, *, local_files_only):
        assert local_files_only
        if copies.setdefault(name, None) is None:
            raise FileNotFoundError(name)
        return copies[name]

    monkeypatch.setattr("huggingface_hub.utils.get_session", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", copy_of)
    return copies


NOWHERE = "there is no file or directory {} here, and the hub cannot be reached for it"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("inspect some/model", f"{NOWHERE.format('some/model')}, and no copy of it was loaded before"),
        ("inspect Qwen3", "there is no model type 'Qwen3'; did you mean qwen3, .*\\? The hub cannot be reached"),
        ("converge llama --data some/text:en", NOWHERE.format("some/text")),
        ("converge llama --tokenizer some/tokens", f"{NOWHERE.format('some/tokens')}, and no copy of .*"),
    ],
)
def test_no_network_is_called_so_and_asked_once(line, message, without_network, monkeypatch, capsys):
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    command, *arguments = line.split()
    assert main([command, *arguments]) == 2
    assert re.fullmatch(f"fused-norm {command}: {message}\n", capsys.readouterr().err)


def test_without_network_a_model_of_the_hub_is_the_copy_that_was_loaded(checkpoint, without_network, capsys):
    assert main(["inspect", "qwen3"]) == 0
    assert without_network == {}, "a model type is known without the hub"
    capsys.readouterr()
    without_network["some/model"] = str(checkpoint)
    assert main(["inspect", "some/model"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("some/model, built without weights")
    assert SUMMARY in out
    assert "model.layers.*.self_attn.q_norm" in out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError("broken"), OSError("bad input")])
@pytest.mark.parametrize(
    ("line", "interrupted"),
    [
        ("inspect {checkpoint}", "transformers.AutoConfig.from_pretrained"),
        ("check {checkpoint}", "transformers.AutoConfig.from_pretrained"),
        ("converge --config {checkpoint}", "transformers.AutoConfig.from_pretrained"),
        ("env", "platform.python_version"),
        ("run {script}", "fused_norm.patcher.on_load"),
    ],
)
def test_ctrl_c_ends_a_command_with_a_line_also_if_an_import_makes_an_error_of_it(
    line, interrupted, error, script, checkpoint, monkeypatch, capsys
):
    path = script("print('it runs')")

    def swallow(*arguments, **named):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    monkeypatch.setattr(interrupted, swallow)
    command, *arguments = line.format(script=path, checkpoint=checkpoint).split()
    assert main([command, *arguments]) == 130
    captured = capsys.readouterr()
    assert captured.err == f"fused-norm {command}: stopped\n"
    assert "it runs" not in captured.out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_without_ctrl_c_is_what_it_is(monkeypatch):
    monkeypatch.setattr("fused_norm.patcher.on_load", lambda **named: {}["broken"])
    with pytest.raises(KeyError, match="broken"):
        main(["run", __file__])


def test_ctrl_c_that_an_import_swallows_stops_before_the_script(script, monkeypatch, capsys):
    @contextmanager
    def swallow(**named):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        yield

    monkeypatch.setattr("fused_norm.patcher.on_load", swallow)
    assert main(["run", str(script("print('it runs')"))]) == 130
    assert capsys.readouterr() == ("", "fused-norm run: stopped\n")


def test_a_script_and_a_handler_of_other_code_keep_their_own_ctrl_c(script, monkeypatch, capsys):
    path = script("import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    assert main(["run", str(path)]) == 0
    assert capsys.readouterr().out == "True\n"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(["env"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("error", "code"), [("KeyboardInterrupt", 130), ("KeyError: 'lost'", 1)])
def test_a_script_that_is_stopped_or_fails_has_the_traceback_that_python_prints(error, code, script, capsys):
    path = script(f"def fail():\n    raise {error.replace(': ', '(')}{')' * (':' in error)}\n\nfail()\n")
    assert main(["run", str(path)]) == code
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last):\n" in printed
    assert printed.count("  File ") == printed.count("train.py") == 2
    assert f"{error}\n" in printed


def test_what_packages_say_of_themselves_when_they_are_imported_is_left_out(caplog):
    for name in ("torchao", "torchao.quantization", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).warning("of %s", name)
    logging.getLogger("torchao").error("an error")
    assert caplog.messages == ["of torchao.quantization", "an error"]


@pytest.mark.parametrize("name", ["/no/such", "./such", "no/such/folder", "such.json", "such/", "texts/missing.jsonl"])
@pytest.mark.parametrize(
    "line",
    ["inspect {}", "check {}", "converge --config {}", "converge llama --tokenizer {}", "converge llama --data {}"],
)
def test_a_path_that_is_nowhere_is_called_so(line, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*line.format(name).split()]) == 2
    error = capsys.readouterr().err
    assert f"there is no file or directory {name}\n" in error


@pytest.mark.parametrize("name", ["wikitext", "Qwen/Qwen2.5-0.5B", "some/model.v2", "opt-1.3b", "some/x.bins"])
def test_a_name_that_the_hub_may_have_is_no_missing_path(name, without_network, monkeypatch, capsys):
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    assert main(["inspect", name]) == 2
    assert "hub cannot be reached" in capsys.readouterr().err


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class RemoteConfig(LlamaConfig):
    model_type = "remote"

class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def test_inspect_runs_code_of_the_model_only_when_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    config = tiny_config("llama").to_dict() | {
        "model_type": "remote",
        "auto_map": {"AutoConfig": "code.RemoteConfig", "AutoModelForCausalLM": "code.RemoteForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    (tmp_path / "code.py").write_text(REMOTE)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--trust-remote-code"]) == 0
    assert "RemoteForCausalLM" in capsys.readouterr().out


def test_contradictory_options_are_named_as_they_were_written(capsys):
    assert main(["inspect", "llama", "--no-norms", "--residual"]) == 2
    assert capsys.readouterr().err == "fused-norm inspect: --residual contradicts --no-norms\n"


def test_check_finds_a_tiny_model_within_budget(capsys, device):
    assert main(["check", "qwen3", "--batch", "1", "--seq", "8", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "a tiny qwen3, random weights, seed 0" in out
    assert ("Triton's interpreter" if device == "cpu" else "Triton on") in out
    assert "truth in float64" in out
    assert "verdict: within budget in one step" in out
    assert max(map(len, out.splitlines())) <= 80


def test_check_takes_a_loss_of_log_probs(capsys):
    assert main(["check", "llama", "--layers", "1", "--batch", "1", "--seq", "8", "--loss-of", "log-probs"]) == 0
    assert re.search(
        r"^log-probs .*^entropies .*^loss .*verdict: within budget", capsys.readouterr().out, re.MULTILINE | re.DOTALL
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there layers are replayed")
def test_check_says_why_nothing_is_replayed(capsys):
    assert main(["check", "llama", "--layers", "1", "--seq", "8", "--cuda-graphs"]) == 0
    assert "CUDA graphs: not replayed: there is no CUDA device\nverdict: within budget" in capsys.readouterr().out


def test_a_command_on_a_cpu_has_kernels_interpreted_without_being_told():
    result = process("-m", "fused_norm", "check", "llama", "--device", "cpu", "--batch", "1", "--seq", "8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Triton's interpreter" in result.stdout


def test_check_takes_a_checkpoint_with_its_own_weights(tmp_path, capsys):
    model = build("qwen3", seed=0)
    model.model.layers[1].mlp.up_proj.weight.data.fill_(math.inf)
    model.save_pretrained(tmp_path)
    arguments = ["check", str(tmp_path), "--batch", "1", "--seq", "8", "--dtype", "bfloat16", "--json"]
    assert main(arguments) == 2
    assert "not finite" in capsys.readouterr().err
    assert main([*arguments, "--layers", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["dtype"]) == (True, "bfloat16")
    kept = [name for name, _ in model.named_parameters() if "layers.1." not in name]
    assert {row["name"] for row in result["deviations"]} == {"logits", "loss", *(f"{name}.grad" for name in kept)}


def test_check_exits_1_when_the_fused_model_is_wrong(wrong_where_fused, capsys):
    assert main(["check", "llama", "--batch", "1", "--seq", "8", "--dtype", "float32"]) == 1
    assert re.search(r"layers\.0\.input_layernorm.* over\n", capsys.readouterr().out)


def test_check_takes_a_model_of_which_the_loss_alone_is_fused_and_without_it_says_why_there_is_nothing(
    tmp_path, capsys
):
    GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=264).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--batch", "1", "--seq", "8", "--dtype", "float32"]) == 0
    assert "verdict: within budget in one step" in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--no-loss"]) == 2
    first, summary, head, *rows = capsys.readouterr().err.splitlines()[-8:]
    assert first == "fused-norm check: nothing to fuse in GPT2LMHeadModel, so there is nothing to check"
    assert summary == "GPT2LMHeadModel (gpt2): fused nothing; kept 4"
    assert head == "kept LayerNorm: subtracts a mean, so it is no RMSNorm"
    assert rows[:3] == [f"     1 norm  transformer.{name}" for name in ("h.0.ln_1", "h.0.ln_2", "ln_f")]
    assert rows[3:] == ["kept GPT2LMHeadModel: switched off: --no-loss", "     1 loss  lm_head"]


def test_check_refuses_what_a_family_should_have_unless_told_otherwise(monkeypatch, capsys):
    class Norm(torch.nn.LayerNorm):
        pass

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm", Norm)
    line = ["check", "llama", "--batch", "1", "--seq", "8", "--dtype", "float32"]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert "lacks sites that its family is known to have; pass --no-strict to fuse the others\n" in error
    assert "\n  model.layers.1.post_attention_layernorm (norm): subtracts a mean" in error
    assert main([*line, "--no-strict"]) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("t5", "no causal language model"),
        ("llama --layers 99", "--layers 99"),
        ("llama --seq 1", "0 predictions"),
        ("llama --device cuda:99", "cuda:99"),
        ("llama --device nosuch", "nosuch"),
        ("llama --device meta", "take cpu or cuda"),
        ("llama --truth float32 --dtype float32", "float64 truth"),
    ],
)
def test_check_says_what_it_cannot_check(line, message, capsys):
    assert main(["check", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_run_is_the_script_with_its_models_fused(script, tmp_path):
    path = script(LOAD + "import sys, helper\nprint(sys.argv, __name__, sys.path[0], helper.__name__)\nsys.exit(7)\n")
    script("", "helper.py")
    result = process("-m", "fused_norm", "run", path, "--lr", "1", "--strict", cwd=path.parents[1])
    assert result.returncode == 7, result.stderr
    assert result.stdout.strip() == f"{[str(path), '--lr', '1', '--strict']} __main__ {tmp_path} helper"
    assert re.search(rf"^fused-norm: Qwen3ForCausalLM.*{SUMMARY}", result.stderr, re.MULTILINE)
    assert "nothing was fused" not in result.stderr


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
RUN = ("-m", "fused_norm", "run")
STARTS = """
import subprocess, sys
subprocess.run([sys.executable, *{line}, {child!r}], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "inside"),
    [((*RUN, *TORCHRUN), None), ((*RUN, "--no-qk"), RUN)],
    ids=["above a launcher", "above itself"],
)
def test_run_covers_other_processes_and_tells_of_a_model_once(line, inside, script):
    """A process may import the patcher before transformers; the options of the inner command hold."""
    path = script("import fused_norm.patcher\n" + LOAD, "child.py")
    if inside is not None:
        path = script(STARTS.format(line=list(inside), child=str(path)))
    result = process(*line, path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("fused-norm: Qwen3ForCausalLM") == result.stderr.count(SUMMARY) == 1
    assert "nothing was fused" not in result.stderr


@pytest.mark.slow
def test_the_options_of_run_hold_in_processes_that_the_script_starts(script, capfd):
    path = script(STARTS.format(line=[], child=str(script(LOAD + LOAD_BERT, "child.py"))))
    assert main(["run", "--no-rope", "--strict", str(path)]) == 1
    error = capfd.readouterr().err
    assert ", ".join(f"{SITES[kind]} {kind}" for kind in ("norm", "qk", "residual", "mlp")) in error
    assert "FusedNormError: nothing to fuse in BertModel" in error


@pytest.mark.parametrize("code", ["'reason'", "None", "3"])
def test_run_passes_the_exit_on(script, code):
    with pytest.raises(SystemExit) as end:
        main(["run", str(script(f"import sys; sys.exit({code})"))])
    assert repr(end.value.code) == code


def test_run_restores_argv_and_path(script):
    argv, path = list(sys.argv), list(sys.path)
    assert main(["run", str(script("import sys\nassert sys.argv[1:] == ['--', '-m', 'x']")), "--", "-m", "x"]) == 0
    assert (sys.argv, sys.path) == (argv, path)


def test_run_runs_a_module_as_python_does(script, tmp_path, monkeypatch, capsys):
    script("", "package/__init__.py")
    path = script("import sys\nprint(__name__, sys.argv, __spec__.name)\n", "package/__main__.py")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-m", "package", "a", "-m"]) == 0
    assert capsys.readouterr().out.strip() == f"__main__ {[str(path), 'a', '-m']} package.__main__"


@pytest.mark.parametrize(
    ("options", "text", "code", "message"),
    [
        ("", LOAD_BERT, 0, "nothing was fused (models built, also by processes of the script: 1)\n"),
        ("--strict", LOAD_BERT, 1, "without --strict the script goes on with such a model\n"),
        *((f"--recompute{level}", LOAD, 0, "recompute in 2 layers") for level in ("=True", " mlp", " --")),
        ("--cuda-graphs", LOAD, 0, "; CUDA graphs in "),
        ("--no-qk", LOAD, 0, f"{SITES['norm']} norm, {SITES['residual']} residual, {SITES['mlp']} mlp"),
    ],
)
def test_run_fuses_what_it_is_told_and_says_what_it_has_fused(options, text, code, message, script, capsys):
    assert main(["run", *options.split(), str(script(text))]) == code
    error = capsys.readouterr().err
    assert message in error
    if text is LOAD_BERT:
        assert ("FusedNormError: nothing to fuse in BertModel" in error) == ("models built" not in error) == bool(code)
        assert error.endswith(f"fused-norm: {message}")
        assert code or "fused-norm: BertModel" in error


def test_run_covers_threads_that_the_script_starts(script, capsys):
    load = f"def load():{textwrap.indent(LOAD, '    ')}"
    path = script(f"import threading\n{load}thread = threading.Thread(target=load)\nthread.start()\nthread.join()\n")
    assert main(["run", str(path)]) == 0
    assert SUMMARY in capsys.readouterr().err


def test_run_fuses_adapters_that_the_script_puts_into_its_model(script, capsys):
    lora = "peft.get_peft_model(model, peft.LoraConfig(target_modules=['q_proj']))"
    assert main(["run", str(script(f"import peft{LOAD}{lora}\n"))]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fused-norm: ")]
    assert [(SUMMARY in line, "2 lora" in line) for line in lines] == [(True, False), (True, True)]


def test_run_leaves_processes_without_models_as_they_are(script, tmp_path, monkeypatch, capfd):
    own = tmp_path / "own"
    script("print('their own sitecustomize')", "own/sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(own))
    child = "import sys; print(sys.path); print({'torch', 'transformers', 'triton', 'fused_norm'} & set(sys.modules))"
    start = [sys.executable, "-c", child]
    path = script(f"import subprocess\nsubprocess.run({start}, check=True)\n")
    assert main(["run", str(path)]) == 0
    result = capfd.readouterr().out
    subprocess.run(start, check=True)
    assert result == capfd.readouterr().out
    assert re.fullmatch(r"their own sitecustomize\n\['', .*\]\nset\(\)\n", result)
    assert os.environ["PYTHONPATH"] == str(own)


@pytest.mark.parametrize("strict", [True, False])
def test_run_says_where_a_process_has_no_fused_norm(strict, script, tmp_path, capfd):
    script("", "transformers/__init__.py")
    script("", "transformers/modeling_utils.py")
    child = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['fused_norm'] = None\n"
    child += "import transformers.modeling_utils"
    path = script(f"import subprocess, sys\nsys.exit(subprocess.run({[sys.executable, '-c', child]}).returncode)\n")
    with pytest.raises(SystemExit) as end:
        main(["run", *(["--strict"] if strict else []), str(path)])
    assert end.value.code == strict
    assert f"models stay stock in this process: {sys.executable} has no fused_norm" in capfd.readouterr().err


@pytest.mark.parametrize("strict", [True, False])
def test_run_says_where_processes_would_ignore_what_it_tells_them(strict, script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "flags", types.SimpleNamespace(ignore_environment=1, no_site=0, isolated=0))
    assert main(["run", *(["--strict"] if strict else []), str(script(""))]) == (2 if strict else 0)
    assert "under python -E, -I or -S the processes that a script starts keep" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["no/such/script.py", "-m no_such_module", "-m no_such.module", "-m"])
def test_run_says_what_it_cannot_find(line, capsys):
    assert main(["run", *line.split()]) == 2
    assert line.split()[-1] in capsys.readouterr().err


def test_env_says_what_a_bug_report_needs(capsys):
    assert main(["env"]) == 0
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["fused_norm"] == fused_norm.__version__
    assert str(torch.__version__).startswith(facts["torch"])  # a build suffix such as +cu130 may follow
    assert facts["transformers"]
    assert facts["patched models run"].startswith("Triton on " if torch.cuda.is_available() else "Triton's interpreter")
    assert any(name.startswith("plans on") for name in facts) == torch.cuda.is_available()


TINY = {name: size for name, size in FAMILIES["llama"].tiny.items() if name.startswith(("vocab", "hidden", "num_"))}
"""What all tiny models have."""


def printed_row(capsys, model_type):
    """Return the row that ``inspect --row`` prints for a type, and what it prints after that."""
    assert main(["inspect", model_type, "--row"]) == 0
    row, _, after = capsys.readouterr().out.partition(",\n\n")
    names = {"Family": Family, "NormSpec": fused_norm.NormSpec, "Shape": Shape, "_tiny": lambda **given: TINY | given}
    return eval(row, names), after


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "glm4", "olmo3", "qwen3_5_moe_text", "gpt_oss"])
def test_inspect_prints_a_row_of_the_table_that_says_what_the_table_says(model_type, capsys):
    if model_type not in families_here():
        pytest.skip(f"this release of transformers has no {model_type}")
    row, after = printed_row(capsys, model_type)
    known = FAMILIES[model_type]
    for layers in (2, 4):
        missing = known.sites(layers).keys() - row.sites(layers).keys()
        assert missing <= ({"experts"} if transformers.__version__.startswith("4.") else set())
        assert row.sites(layers) == {kind: n for kind, n in known.sites(layers).items() if kind not in missing}
    assert replace(row.spec, eps=known.spec.eps) == known.spec
    assert after.startswith("Its tiny model has the sites that the row claims: ")
    assert f"{model_type} is in the table. Its name goes into" in after


def test_inspect_prints_rows_of_other_families_and_the_files_that_want_their_names(capsys):
    row, after = printed_row(capsys, "exaone4")
    (other,) = row.layers_of_type.values()
    assert row.sites(2) == {"loss": 1, "norm": 5, "qk": 4, "rope": 1, "post_norm": 4, "mlp": 2}
    assert other.keys() == {"layer_sites"}
    assert "exaone4 is not in the table yet." in after
    places = re.findall(r"^  (\S+)  ", after, re.MULTILINE)
    assert len(places) > 5
    assert [place for place in places if not (Path(__file__).parents[2] / place).exists()] == []
    assert main(["inspect", "gpt2", "--row"]) == 2
    assert "no norm of a decoder is fused in GPT2LMHeadModel" in capsys.readouterr().err
    assert main(["inspect", "llama", "--row", "--no-mlp"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels run")
def test_without_kernels_env_says_that_stock_code_runs_and_there_is_nothing_to_compare():
    facts = process("-m", "fused_norm", "env")
    why = "stock code: no GPU that torch can use, and TRITON_INTERPRET=1 is not set"
    assert f"patched models run  {why}\n" in facts.stdout, facts.stdout + facts.stderr
    for command in ("check", "converge"):
        refused = process("-m", "fused_norm", command, "llama", TRITON_INTERPRET="0")
        assert refused.returncode == 2
        why = "patched models run stock code on this CPU: kernels need Triton, and TRITON_INTERPRET=1"
        assert refused.stderr.endswith(f"fused-norm {command}: {why}\n"), refused.stderr


def test_env_says_how_rows_of_a_width_are_planned(capsys):
    assert main(["env", "--plans", "128"]) == 0
    out = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert out["(add +) norm"].startswith("ForwardPlan(mode='multi_wave_cached', rows=")
    assert out["qk norm + RoPE backward"].startswith("HeadsPlan(q=HeadsTile(tokens=1, heads=16)")
    assert main(["env", "--plans", "20000"]) == 0
    assert "norm + add" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("inspect", [f"--no-{name.replace('_', '-')}" for name in SWITCHES]),
        ("converge", ["{demo,quick,full}", "folder of results, report (converge)"]),
        ("demo", ["{demo,quick,full}", "folder of results, report (demo)"]),
        *((command, []) for command in ("check", "run", "env")),
    ],
)
def test_help_names_the_options_and_fits_a_terminal_of_80_columns(command, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert [word for word in words if word not in " ".join(out.split())] == []


COMMAND = Path(sys.executable).with_name("fused-norm")


@pytest.mark.skipif(not COMMAND.exists(), reason="the package is not installed, only on the path")
def test_the_installed_command_is_this_one():
    result = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["fused-norm", fused_norm.__version__]
