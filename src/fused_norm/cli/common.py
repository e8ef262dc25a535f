"""Parts that several commands share: options, the choice of a device, and finding the model somebody named."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..old_names import OLD_NAMES
from ..options import SWITCHES, FuseOptions, RecomputeLevel

if TYPE_CHECKING:
    import torch

    from ..convergence.model_source import ModelSource


class UsageError(Exception):
    """Something the user named cannot be used. The exit code is 2."""


def in_one_line(error: Exception) -> str:
    """The message of an exception that others have raised, which may have any number of lines."""
    return " ".join(str(error).split())


def as_flags(text: str) -> str:
    """A message with options of ``apply_fused_norm`` written as flags: ``--no-strict`` for ``strict=False``."""
    named = "|".join([*SWITCHES, "recompute", "strict"])
    return re.sub(
        rf"\b({named})=(True|False)\b",
        lambda option: ("--" if option[2] == "True" else "--no-") + _flag(option[1]),
        text,
    )


def _flag(option: str) -> str:
    """The name of an option as a flag has it, without the dashes before it."""
    return option.replace("_", "-")


def add_fuse_options(parser: argparse.ArgumentParser) -> None:
    """The flags of ``apply_fused_norm``: for each kind of site, with a ``--no-`` form, and those of other options."""
    texts = {
        name: f"fuse {switch.what}" + (f"; follows --{_flag(switch.follows)}" if switch.follows else "")
        for name, switch in SWITCHES.items()
    }
    texts["shared_inputs"] = "let linears after a fused norm share one backward, and one cast"
    texts |= {old: argparse.SUPPRESS for old, new in OLD_NAMES.items() if new in texts}
    for name, text in texts.items():
        action, absent = argparse.BooleanOptionalAction, argparse.SUPPRESS
        parser.add_argument(f"--{_flag(name)}", action=action, default=absent, help=text)
    text = "only sites whose path matches, such as 'model.layers.*'; may be given several times"
    parser.add_argument("--modules", action="append", metavar="PATTERN", help=text)
    text = "recompute outputs of fused operators in the backward; with mlp or attention those of linears too"
    parser.add_argument(
        "--recompute", nargs="?", type=_recompute_level, metavar="LEVEL", const=True, default=False, help=text
    )
    parser.add_argument("--no-recompute", action="store_const", const=False, dest="recompute", help="keep them all")
    text = "replay the forward and backward of each layer as CUDA graphs, from their second sight on"
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=False, help=text)


def _recompute_level(text: str) -> RecomputeLevel:
    """The type of the value of ``--recompute``."""
    levels: dict[str, RecomputeLevel] = {str(level): level for level in get_args(RecomputeLevel) if level}
    if text not in levels:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(levels)}; without a level, before a name, write --recompute=True"
        )
    return levels[text]


def fuse_options(args: argparse.Namespace, *, strict: bool) -> FuseOptions:
    """The options chosen by the arguments of ``add_fuse_options``. Prints a line for each that has its old name.

    Raises:
        UsageError: they contradict each other.
    """
    given = {field.name for field in fields(FuseOptions)} | {*OLD_NAMES}
    chosen = {name: value for name, value in vars(args).items() if name in given}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", FutureWarning)
            options = FuseOptions(**{**chosen, "strict": strict})
    except ValueError as error:
        raise UsageError(str(error)) from error
    for warning in warned:
        print(warning.message, file=sys.stderr)
    return options


def interpret_without_gpu(device: str | None = None) -> torch.device:
    """The device to compute on. On a CPU the kernels run in Triton's interpreter, chosen before they are imported.

    Args:
        device: what the user asked for. None means the GPU if there is one.

    Raises:
        UsageError: there is no such device, or kernels do not run on it.
    """
    import torch

    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} cannot be used: take cpu or cuda")
    if chosen.type == "cpu" and importlib.util.find_spec("triton"):
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from ..check.fast_interpreter import speed_up

        speed_up()
    return chosen


def backend(device: torch.device) -> str | None:
    """The code that computes the fused operators on ``device``, in words; None if patched models run stock code."""
    if device.type != "cpu":
        import torch

        return f"Triton on {torch.cuda.get_device_name(device)}"
    if importlib.util.find_spec("triton"):
        from ..kernels.triton.devices import INTERPRETED

        if INTERPRETED:
            return "Triton's interpreter, on the CPU"
    return None


def kernels_on(device: torch.device) -> str:
    """The code that computes the fused operators on ``device``, in words.

    Raises:
        UsageError: patched models run stock code there, so that there is nothing to compare with stock.
    """
    words = backend(device)
    if words is None:
        raise UsageError("patched models run stock code on this CPU: kernels need Triton, and TRITON_INTERPRET=1")
    return words


MODEL_HELP = "a model directory, a config.json, a model type such as qwen3, or a name on the hub"


_FILE = re.compile(
    r".\.(txt|text|md|rst|log|py|html|xml|ya?ml|jsonl?|csv|tsv|parquet|arrow|gz|bz2|xz|zst|zip|tar"
    r"|safetensors|bin|pth?|ckpt|gguf|model)$",
    re.IGNORECASE,
)
"""The end of the name of a file of text, of data, of weights or of a tokenizer, which no name on the hub has."""


def refuse_missing_path(name: str) -> None:
    """Check that a name is not that of a missing file or directory; a name with one slash may be one on the hub.

    Raises:
        UsageError: it is.
    """
    looks_like_path = (
        name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or _FILE.search(name) is not None
    )
    if looks_like_path and not Path(name).exists():
        raise UsageError(f"there is no file or directory {name}")


def find_causal_lm(name: str) -> ModelSource:
    """Find what ``name`` stands for, as ``find_model`` does.

    Raises:
        UsageError: it is no causal language model, or nothing can be read under this name.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    source = find_model(name)
    if type(source.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{source.name} is no causal language model ({source.config.model_type})")
    return source


def find_model(name: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Find what ``name`` stands for: a directory, a file, a model type, a name on the hub, in this order.

    Without a network a model of the hub is the copy of it that was loaded before.

    Returns:
        The model, without weights if there are none; its name says what was found.

    Raises:
        UsageError: nothing can be read under this name.
    """
    refuse_missing_path(name)
    from transformers import CONFIG_MAPPING, AutoConfig

    from ..convergence.model_source import ModelSource

    path = Path(name)
    if not path.exists() and name in CONFIG_MAPPING:
        return ModelSource(f"the default {name} of transformers", AutoConfig.for_model(name))
    if path.is_dir() and not (path / "config.json").is_file():
        adapter = path / "adapter_config.json"
        if adapter.is_file():
            raise UsageError(f"{name} holds a PEFT adapter; name its base model, {_base_model(adapter)}")
        raise UsageError(f"{name} has no config.json")
    try:
        place = on_this_machine(name)
        # Not None: with None transformers asks on the terminal whether to trust the code.
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        alike = difflib.get_close_matches(name.lower(), CONFIG_MAPPING) if not path.exists() else []
        if alike and "/" not in name:
            meant = f"there is no model type {name!r}; did you mean {', '.join(alike)}?"
            cannot = "cannot be reached" if isinstance(error, NoNetworkError) else "has no model of this name either"
            raise UsageError(f"{meant} The hub {cannot}") from error
        if isinstance(error, NoNetworkError):
            raise UsageError(str(error)) from error
        hint = " (--trust-remote-code)" if "trust_remote_code" in str(error) else ""
        where = "" if path.exists() else ", which is no directory here"
        raise UsageError(f"no config can be read from {name!r}{where}{hint}: {in_one_line(error)}") from error
    if path.is_file():
        return ModelSource(f"the config {name}", config)
    if path.is_dir() and not any(True for pattern in ("*.safetensors", "*.bin") for _ in path.glob(pattern)):
        return ModelSource(f"the config in {name}", config)
    return ModelSource(name, config, place)


class NoNetworkError(OSError):
    """The hub cannot be reached for what was named, and there is no copy of it."""


def on_this_machine(name: str, *, may_be_kept: bool = True) -> str:
    """A path as it is; a name on the hub too, or without a network the folder that keeps what was loaded of it.

    Args:
        name: the path, or the name of a model on the hub.
        may_be_kept: look for that folder; data that is streamed has none.

    Raises:
        NoNetworkError: there is no network, and no such folder.
    """
    if Path(name).exists():
        return name
    import huggingface_hub

    try:
        # Asked once: when it is asked for a file, the hub's client tries again for half a minute.
        huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
        return name
    except Exception:  # of requests or of httpx, by the client's release
        with contextlib.suppress(OSError, ValueError):
            if may_be_kept:
                return huggingface_hub.snapshot_download(name, local_files_only=True)
    kept = ", and no copy of it was loaded before" if may_be_kept else ""
    raise NoNetworkError(f"there is no file or directory {name} here, and the hub cannot be reached for it{kept}")


def _base_model(adapter: Path) -> str:
    """The name of the model that a PEFT adapter was trained on, from its config."""
    try:
        name = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"no base model can be read from {adapter}: {in_one_line(error)}") from error
    return str(name) if name else "which its config does not name"


def positive(text: str) -> int:
    """The type of an argument that is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def positive_float(text: str) -> float:
    """The type of an argument that is a finite number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def results_folder(path: Path) -> Path:
    """The folder of ``--out``, made if it is not there.

    Raises:
        UsageError: it cannot be made, or no file in it can.
    """
    with writing_to(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """A context in which a file that cannot be written is an error that names it.

    Raises:
        UsageError: a file of ``folder`` cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename2 or error.filename or folder} cannot be written ({error.strerror})"
        ) from error


def take_layers(config: Any, layers: int) -> None:
    """Shorten a config in place to its first ``layers`` layers.

    Raises:
        UsageError: it has fewer, or does not say how many.
    """
    text = config.get_text_config()
    available = getattr(text, "num_hidden_layers", None)
    if available is None or layers > available:
        raise UsageError(
            f"--layers {layers}: the config of {config.model_type} has {available or 'no num_hidden_layers'}"
        )
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
