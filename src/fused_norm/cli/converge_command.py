"""``fused-norm converge``: does training come out the same, stock and fused, against a measured noise floor?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..convergence.comparison import EXECUTIONS, FEATURES, GRAPHS, LORA, PRECISIONS, QLORA, by_baseline
from ..convergence.progress import Progress
from ..convergence.tiers import TIERS
from ..model_configs import FAMILIES
from . import STOPPED
from .common import (
    MODEL_HELP,
    UsageError,
    find_causal_lm,
    in_one_line,
    interpret_without_gpu,
    kernels_on,
    on_this_machine,
    positive,
    positive_float,
    refuse_missing_path,
    results_folder,
    writing_to,
)
from .env_command import environment

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..convergence.model_source import ModelSource
    from ..convergence.plan import Plan
    from ..convergence.tiers import TrainingOptions
    from ..convergence.verdict import ComparisonResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code: 0 when every verdict is green, 1 when one is red, 2 for input that cannot be used or a run that "
        "says nothing. Several processes: accelerate launch [options] -m fused_norm "
        "converge ...; FSDP2 as accelerate's own options ask for it."
    )
    tiers = "; ".join(f"{name}: {tier.what}" for name, tier in TIERS.items())
    parser.add_argument(
        "family", nargs="*", metavar="FAMILY", help=f"small models to train, of {', '.join(FAMILIES)} (the tier's)"
    )
    parser.add_argument("--config", action="append", default=[], metavar="MODEL", help=f"train this: {MODEL_HELP}")
    parser.add_argument("--tier", choices=tuple(TIERS), default="quick", help=f"{tiers} (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("converge"), help="folder of results, report (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU if there is one")
    parser.add_argument("--dtype", action="append", choices=tuple(PRECISIONS), help="only these; mixed: bf16 autocast")
    parser.add_argument("--feature", action="append", choices=tuple(FEATURES), metavar="SITES",
                        help=f"only these sites fused, of {', '.join(FEATURES)}")  # fmt: skip
    parser.add_argument("--axis", action="append", choices=EXECUTIONS, metavar="HOW",
                        help=f"only steps that run like this, of {', '.join(EXECUTIONS)}")  # fmt: skip
    parser.add_argument("--seeds", type=positive, default=1, help="how many seeds (1)")
    parser.add_argument("--jobs", type=positive, default=1, help="how many processes share the comparisons (1)")
    parser.add_argument("--steps", type=positive, help="optimizer steps")
    parser.add_argument("--length", type=positive, help="tokens in a sequence")
    parser.add_argument(
        "--learning-rate", type=positive_float, help="AdamW's, after the warm-up; ten times that if weights are bf16"
    )
    parser.add_argument("--data", metavar="TEXT", help="a text file or a dataset, NAME[:CONFIG] (Python's own source)")
    parser.add_argument("--column", default="text", help="the dataset's column with the text (text)")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="a folder or name on the hub (a checkpoint's own, else bytes); or bytes"
    )
    parser.add_argument("--again", action="store_true", help="run again what an earlier run has finished")


def run(args: argparse.Namespace) -> int:
    """Train, compare, and write the report; the exit code is in the help."""
    refuse_misspelt(args)
    began = time.perf_counter()
    if os.environ.get("RANK", "0") == "0":
        print("loading torch, transformers and accelerate takes some seconds", flush=True)
    on_cpu = args.device == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    device = interpret_without_gpu("cpu" if on_cpu else args.device)
    # After the choice of the interpreter, because these import the kernels.
    from ..convergence import report
    from ..convergence.estimate import seconds_of
    from ..convergence.suite import ResultStore, run_plan
    from ..convergence.training import accelerator_for
    from ..convergence.verdict import ComparisonResult

    loading = time.perf_counter() - began
    words = kernels_on(device)
    first = accelerator_for(cpu=device.type == "cpu").is_main_process
    plan = plan_for(args, device)
    if args.jobs > 1 and plan.processes > 1:
        raise UsageError("--jobs splits the comparisons and accelerate launch the batches; take one of them")
    store = None
    if first:
        with writing_to(results_folder(args.out)):
            store = ResultStore(args.out, fresh=args.again)
    say: Callable[..., Any] = partial(print, flush=True) if first else lambda *_: None
    spread = "one process"
    if plan.processes > 1:
        spread = f"{plan.processes} processes ({plan.facts['spread']})"
    elif args.jobs > 1:
        spread = f"{args.jobs} processes share the comparisons"
    say(f"device: {words}, {spread}")
    say(f"text:   {plan.facts['text']}")
    shared = f"{_counted(len(by_baseline(plan.comparisons)), 'stock run')} with {plan.settings.controls} controls each"
    say(f"plan:   {_counted(len(plan.comparisons), 'comparison')}, {shared}")
    is_timed = args.tier == "demo" and device.type == "cpu" and set(args.axis or ()) <= {"eager"}
    if store is not None and plan.processes == 1 and is_timed:
        missing = [each for each in plan.comparisons if store.load(each, plan.settings_key(each)) is None]
        if missing:
            say(f"time:   {_in_words(seconds_of(plan, missing, args.jobs, loading))}, by two steps timed just now")
    results: list[ComparisonResult] = []
    progress = _Progress(plan, say, visible=first and args.jobs == 1)
    stopped = False
    try:
        for result in run_plan(plan, store, progress, jobs=args.jobs):
            results.append(result)
    except KeyboardInterrupt:
        stopped = True
    except OSError as error:
        raise UsageError(
            f"{len(results)} results are in {args.out}, and the next cannot be written: {error}"
        ) from error
    finally:
        progress.bar.close()
    results.sort(key=lambda result: plan.comparisons.index(result.comparison))
    if first and results:
        say("\n" + "\n\n".join(filter(None, (report.table(results), report.explanations(results)))))
        say("\n" + textwrap.fill(report.summary(results), 80))
        not_run = set(plan.comparisons) - {result.comparison for result in results}
        with writing_to(args.out):
            all_results = [*results, *map(ComparisonResult, sorted(not_run))]
            (args.out / "report.json").write_text(report.as_json(all_results, plan.facts), encoding="utf-8")
            (args.out / "report.html").write_text(report.as_page(all_results, plan.facts), encoding="utf-8")
        say(f"report: {args.out / 'report.html'}")
    if stopped:
        done = f"{len(results)} of {len(plan.comparisons)} comparisons done"
        say(f"stopped with {done}; the same command goes on from there")
        return STOPPED
    return report.exit_code(results)


def refuse_misspelt(args: argparse.Namespace) -> None:
    """Check what can be checked before torch is imported.

    Raises:
        UsageError: for an unknown family, two models of one name, a missing path, or a package that is not installed.
    """
    if unknown := [name for name in args.family if name not in FAMILIES]:
        raise UsageError(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}; take --config for other models")
    names = [*args.family, *map(_label, args.config)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two models are called {twice[0]}; rename one of their folders or files")
    paths = [*args.config, (args.data or "").partition(":")[0], args.tokenizer or ""]
    for path in filter(None, paths):
        refuse_missing_path(path)
    reads_dataset = args.data is not None and not Path(args.data).is_file()
    for module in ("accelerate", "matplotlib", *(["datasets"] if reads_dataset else [])):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"needs {module}: pip install 'fused-norm[convergence]'")
    for how in args.axis or ():
        if missing := [package for package in needed_by(how) if importlib.util.find_spec(package) is None]:
            raise UsageError(f"--axis {how} needs {missing[0]}: pip install {missing[0]}")
    if args.dtype and "mixed" not in args.dtype and any(how in QLORA for how in args.axis or ()):
        raise UsageError(f"--axis {' and '.join(QLORA)} are for --dtype mixed: without autocast PEFT's own code runs")


def needed_by(execution: str) -> tuple[str, ...]:
    """The packages that an execution needs besides those of all."""
    return ("peft", "bitsandbytes") if execution in QLORA else ("peft",) if execution in LORA else ()


def _label(name: str) -> str:
    """Return the name for a model of ``--config``: that of its folder or file."""
    return Path(name).stem if Path(name).is_file() else Path(name).name


def plan_for(args: argparse.Namespace, device: torch.device) -> Plan:
    """The plan that a command line asks for.

    Raises:
        UsageError: for models, text or a tokenizer that cannot be used, or for the full tier or CUDA graphs without a
            GPU.
    """
    if args.tier == "full" and device.type == "cpu" and args.device != "cpu":
        raise UsageError("the full tier is for a GPU and there is none; ask for --device cpu if hours do not matter")
    from accelerate import PartialState

    from ..convergence.model_source import ModelSource
    from ..convergence.plan import Plan, comparisons_of
    from ..model_configs import families_here
    from ..patcher.survey import why_no_graphs

    is_asked_for_graphs = GRAPHS in (args.axis or ())
    if is_asked_for_graphs and (reason := why_no_graphs([device])) is not None:
        raise UsageError(f"--axis {GRAPHS} says nothing here: {reason}")
    tier = TIERS[args.tier]
    named = {name: getattr(args, name) for name in ("steps", "length", "learning_rate")}
    settings = replace(tier.settings, **{name: value for name, value in named.items() if value is not None})
    families = args.family or ([] if args.config else [name for name in tier.families if name in families_here()])
    sources = [ModelSource.of_family(name, settings.overrides_of(name)) for name in families]
    sources += [replace(find_causal_lm(name), name=_label(name)) for name in args.config]
    comparisons = comparisons_of(
        tier,
        [source.name for source in sources],
        precisions=args.dtype,
        features=args.feature,
        executions=args.axis,
        seeds=range(args.seeds),
    )
    comparisons = [
        each
        for each in comparisons
        if all(map(importlib.util.find_spec, needed_by(each.execution)))
        and (each.execution != GRAPHS or is_asked_for_graphs or device.type == "cuda")
    ]
    processes = PartialState().num_processes
    step = settings.batch_size * processes
    return Plan(
        comparisons=tuple(comparisons),
        sources={source.name: source for source in sources},
        settings=settings,
        tokens={source.name: _sequences(args, source, settings, step) for source in sources},
        facts={
            **environment(),
            "tier": args.tier,
            "text": f"{args.data or 'source of the standard library'}, {step} x {settings.length} tokens a step",
            "processes": processes,
            "spread": str(PartialState().distributed_type).rpartition(".")[2]
            + (" FSDP" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else ""),
            "settings": repr(settings),
        },
        processes=processes,
        cpu=device.type == "cpu",
    )


def _sequences(args: argparse.Namespace, source: ModelSource, settings: TrainingOptions, step: int) -> Tensor:
    """The text as sequences for a model, enough for all steps if it has so many, and for one at least."""
    from ..convergence.text_sequences import pack, read_dataset, read_files, standard_library, varied

    try:
        tokenize, tokens = _tokenizer(args.tokenizer, source)
        if args.data is None or Path(args.data).is_file():
            texts = read_files(standard_library() if args.data is None else [Path(args.data)])
        else:
            on_this_machine(args.data.partition(":")[0], may_be_kept=False)
            texts = read_dataset(args.data, column=args.column)
        # Twice as many as are drawn, because some are left out.
        limit = 2 * settings.steps * step
        packed = varied(pack(texts, length=settings.length, limit=limit, tokenize=tokenize))
    except (ValueError, OSError) as error:
        raise UsageError(in_one_line(error)) from error
    if len(packed) < step:
        raise UsageError(
            f"the text fills {len(packed)} varied sequences of {settings.length} tokens, and one step takes {step}; "
            "use more text or a smaller --length"
        )
    vocabulary = source.config.get_text_config().vocab_size
    if int(packed.max()) >= vocabulary:
        raise UsageError(f"{source.name} has {vocabulary} tokens, too few for {tokens}")
    return packed


def _tokenizer(name: str | None, source: ModelSource) -> tuple[Callable[[str], Sequence[int]], str]:
    """A tokenizer, and what it makes, in words."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    has_own = source.weights is not None and any((Path(source.weights) / file).is_file() for file in files)
    if name == "bytes" or (name is None and not has_own):
        return str.encode, "bytes"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(on_this_machine(str(name or source.weights)))
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], "its tokenizer"


class _Progress(Progress):
    """A bar over all steps on a terminal, and a line for each comparison."""

    def __init__(self, plan: Plan, say: Callable[..., Any], *, visible: bool) -> None:
        from tqdm import tqdm

        self._plan, self._say, self._missing = plan, say, list(plan.comparisons)
        self._began = time.perf_counter()
        self.bar: Any = tqdm(total=self._steps(), unit="step", leave=False, disable=None if visible else True)

    def _steps(self) -> int:
        """Steps of the comparisons that are missing: of their stock runs, the controls of these, and the fused runs."""
        settings, baselines = self._plan.settings, by_baseline(self._missing)
        return settings.steps * (len(baselines) * (1 + settings.controls) + len(self._missing))

    def run(self, name: str) -> Callable[[int, float], object]:
        whole = len(self._plan.comparisons)
        self.bar.set_description(f"{whole - len(self._missing) + 1}/{whole} {name}")
        return lambda step, loss: self.bar.update()

    def done(self, result: ComparisonResult, *, kept: bool) -> None:
        self._missing.remove(result.comparison)
        if kept:  # these come first, so that no step has been counted
            self.bar.total = self._steps()
        self.bar.clear()
        how = "from an earlier run" if kept else f"{time.perf_counter() - self._began:.0f} s"
        whole = len(self._plan.comparisons)
        progress = f"[{whole - len(self._missing)}/{whole}]"
        self._say(f"{progress} {result.verdict.status:<7} {result.comparison.title}  ({how})")


def _in_words(seconds: float) -> str:
    """A time that is about right."""
    tens = max(10 * round(seconds / 10), 10)
    return f"about {tens} s" if tens < 120 else f"about {round(seconds / 60)} minutes"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
