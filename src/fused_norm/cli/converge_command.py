"""``fused-norm converge``: does training come out the same, stock and fused, against a measured noise floor?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..model_configs import FAMILIES
from .common import MODEL_HELP, UsageError, backend, find_model, interpret_without_gpu

if TYPE_CHECKING:
    import torch

    from ..convergence.plan import Tier
    from ..convergence.store import Result
    from ..convergence.subject import Subject
    from ..convergence.suite import Plan

_PRECISIONS = ("fp32", "mixed", "bf16")
_FEATURES = ("norms", "norms+qk", "norms+rope", "norms+residual", "all")
_EXECUTIONS = ("eager", "compile", "checkpointing", "lora")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code: 0 when every verdict is green, 1 when one is red or a planted fault was missed, 2 for input that "
        "cannot be used or a run that says nothing. Several processes: accelerate launch [options] -m fused_norm "
        "converge ...; FSDP2 as accelerate's own options ask for it."
    )
    parser.add_argument(
        "family", nargs="*", metavar="FAMILY", help=f"small models to train (default: all of {', '.join(FAMILIES)})"
    )
    parser.add_argument("--config", action="append", default=[], metavar="MODEL", help=f"train this: {MODEL_HELP}")
    parser.add_argument("--tier", choices=("quick", "full"), default="quick", help="quick for a CPU, full for a GPU")
    parser.add_argument("--out", type=Path, default=Path("converge"), help="folder of results and report (converge)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU if there is one")
    parser.add_argument("--dtype", action="append", choices=_PRECISIONS, help="only these; mixed is bf16 autocast")
    parser.add_argument("--feature", action="append", choices=_FEATURES, help="only these sites fused")
    parser.add_argument("--axis", action="append", choices=_EXECUTIONS, help="only steps that run like this")
    parser.add_argument("--mutations", action="store_true", help="plant faults too, each of which must turn it red")
    parser.add_argument("--seeds", type=_positive, default=1, help="how many seeds (1)")
    parser.add_argument("--steps", type=_positive, help="optimizer steps")
    parser.add_argument("--length", type=_positive, help="tokens in a sequence")
    parser.add_argument(
        "--learning-rate", type=float, help="AdamW's, after the warm-up; ten times that where weights are bf16"
    )
    parser.add_argument("--data", metavar="TEXT", help="a text file or a dataset, NAME[:CONFIG] (Python's own source)")
    parser.add_argument("--column", default="text", help="the dataset's column with the text (text)")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="a folder or name on the hub (a checkpoint's own, else bytes); or bytes"
    )
    parser.add_argument("--again", action="store_true", help="run again what an earlier run has finished")


def run(args: argparse.Namespace) -> int:
    """Train, compare, and write the report; the exit code is in the help."""
    on_cpu = args.device == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    device = interpret_without_gpu("cpu" if on_cpu else args.device)
    for module, extra in (("accelerate", "convergence"), ("datasets", "convergence"), ("matplotlib", "plots")):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"needs {module}: pip install 'fused-norm[{extra}]'")
    # After the choice of the interpreter, because these import the kernels.
    from ..convergence import plan, report, suite
    from ..convergence.store import Store
    from ..convergence.training import accelerator_for

    first = accelerator_for(cpu=device.type == "cpu").is_main_process
    tier = _tier(args, device)
    whole = _plan(args, tier, device)
    try:
        store = Store(args.out, fresh=args.again) if first else None
    except OSError as error:
        raise UsageError(f"results cannot be written to {args.out}: {error}") from error
    say = print if first else _nothing
    spread = f"{whole.facts['processes']} processes ({whole.facts['spread']})"
    say(f"device: {backend(device)}, {spread if whole.facts['processes'] > 1 else 'one process'}")
    say(f"text:   {whole.facts['text']}")
    shared = f"{len(plan.groups(whole.cases))} stock runs with {tier.settings.controls} controls each"
    say(f"plan:   {len(whole.cases)} comparisons, {shared}")
    results: list[Result] = []
    progress = _Progress(len(whole.cases), say)
    stopped = False
    try:
        for result in suite.run(whole, store, progress):
            results.append(result)
    except KeyboardInterrupt:
        stopped = True
    except OSError as error:
        raise UsageError(
            f"{len(results)} results are in {args.out}, and the next cannot be written: {error}"
        ) from error
    if first:
        _write(args.out, results, whole)
        say(f"\n{report.table(results)}\n\n{report.summary(results)}")
        say(f"report: {args.out / 'report.html'}")
    if stopped:
        say(f"stopped with {len(results)} of {len(whole.cases)} comparisons done; the same command goes on from there")
        return 130
    return report.exit_code(results)


def _tier(args: argparse.Namespace, device: torch.device) -> Tier:
    from ..convergence.plan import TIERS

    if args.tier == "full" and device.type == "cpu" and args.device != "cpu":
        raise UsageError("the full tier is for a GPU and there is none; ask for --device cpu if hours do not matter")
    tier = TIERS[args.tier]
    options = tier.settings.options
    options = replace(
        options, steps=args.steps or options.steps, learning_rate=args.learning_rate or options.learning_rate
    )
    return replace(tier, settings=replace(tier.settings, options=options, length=args.length or tier.settings.length))


def _plan(args: argparse.Namespace, tier: Tier, device: torch.device) -> Plan:
    from accelerate import PartialState

    from ..convergence import data, plan, subject, suite
    from .env_command import environment

    if unknown := [name for name in args.family if name not in FAMILIES]:
        raise UsageError(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}; take --config for other models")
    families = args.family or ([] if args.config else list(FAMILIES))
    subjects = [subject.of_family(name, tier.settings.overrides) for name in families]
    subjects += [_own(name) for name in args.config]
    names = [each.name for each in subjects]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two models are called {twice[0]}; rename one of their folders or files")
    cases = plan.cases(
        tier,
        names,
        precisions=args.dtype,
        features=args.feature,
        executions=args.axis,
        seeds=range(args.seeds),
    )
    if any(case.execution == "lora" for case in cases) and importlib.util.find_spec("peft") is None:
        if args.axis:
            raise UsageError("--axis lora needs peft: pip install peft")
        cases = [case for case in cases if case.execution != "lora"]
    if args.mutations:
        cases += suite.with_mutations(cases)
    processes = PartialState().num_processes
    step = tier.settings.options.batch_size * processes
    drawn = tier.settings.options.steps * step
    packed = {}
    for each in subjects:
        try:
            tokenize, words = _tokenizer(args.tokenizer, each)
            # Twice as many as are drawn, because some are left out.
            found = data.pack(_texts(args), length=tier.settings.length, limit=2 * drawn, tokenize=tokenize)
            packed[each.name] = data.varied(found)
        except (ValueError, OSError) as error:
            raise UsageError(error) from error
        if len(packed[each.name]) < step:
            raise UsageError(
                f"the text fills {len(packed[each.name])} varied sequences of {tier.settings.length} tokens, and one "
                f"step takes {step}; use more text or a smaller --length"
            )
        if int(packed[each.name].max()) >= each.config.get_text_config().vocab_size:
            raise UsageError(f"{each.name} has {each.config.get_text_config().vocab_size} tokens, too few for {words}")
    return suite.Plan(
        cases=tuple(cases),
        subjects={each.name: each for each in subjects},
        settings=tier.settings,
        mutation_steps=tier.mutation_steps,
        sequences=lambda case: data.schedule(packed[case.model], count=drawn, seed=case.seed),
        facts={
            **environment(),
            "tier": args.tier,
            "text": f"{args.data or 'source of the standard library'}, {step} x {tier.settings.length} tokens a step",
            "processes": processes,
            "spread": str(PartialState().distributed_type).rpartition(".")[2]
            + (" FSDP" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else ""),
            "settings": repr(tier.settings),
        },
        cpu=device.type == "cpu",
    )


def _own(name: str) -> Subject:
    import transformers

    from ..convergence.subject import Subject

    source = find_model(name)
    if type(source.config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{source.description} is no causal language model ({source.config.model_type})")
    label = Path(name).stem if Path(name).is_file() else Path(name).name
    return Subject(label, source.config, source.weights)


def _texts(args: argparse.Namespace) -> Any:
    from ..convergence import data

    if args.data is None:
        return data.read_files(data.standard_library())
    if Path(args.data).is_file():
        return data.read_files([args.data])
    return data.read_dataset(args.data, column=args.column)


def _tokenizer(name: str | None, subject: Subject) -> tuple[Callable[[str], Sequence[int]], str]:
    """A tokenizer, and what it makes, in words."""
    from ..convergence.data import utf8_bytes

    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    has_own = subject.weights is not None and any((Path(subject.weights) / file).is_file() for file in files)
    if name == "bytes" or (name is None and not has_own):
        return utf8_bytes, "bytes"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name or subject.weights)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], "its tokenizer"


class _Progress:
    """A bar on a terminal, and a line for each case."""

    def __init__(self, cases: int, say: Callable[..., Any]) -> None:
        from tqdm import tqdm

        self._say, self._cases, self._done, self._began = say, cases, 0, time.perf_counter()
        self._bar: Any = tqdm(unit="step", leave=False, disable=None if say is print else True)

    def run(self, name: str, steps: int) -> Callable[[int, float], object]:
        self._bar.set_description(f"{self._done + 1}/{self._cases} {name}")
        return lambda step, loss: self._bar.update()

    def done(self, result: Result, *, kept: bool) -> None:
        self._done += 1
        self._bar.clear()
        seconds = time.perf_counter() - self._began
        how = "from an earlier run" if kept else f"{seconds:.0f} s"
        self._say(f"[{self._done}/{self._cases}] {result.outcome:<7} {result.case.name}  ({how})", flush=True)


def _write(folder: Path, results: Sequence[Result], plan: Plan) -> None:
    from ..convergence import figures, page, report

    (folder / "report.json").write_text(report.as_json(results, plan.facts), encoding="utf-8")
    (folder / "report.html").write_text(page.render(results, plan.facts), encoding="utf-8")
    if any(result.fused for result in results):
        figures.draw(results, folder / "curves.png")


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
