"""The environment of every test: no hub, one thread, a fixed seed, and Triton's interpreter if there is no GPU."""

from __future__ import annotations

import contextlib
import gc
import inspect
import linecache
import os
import random
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
as_triton_has_it: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
if not HAS_GPU:
    interprets = "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
    assert interprets, "Triton decides at its import whether it interprets kernels"
    os.environ["TRITON_INTERPRET"] = "1"
    from fused_norm.check.fast_interpreter import speed_up

    as_triton_has_it = speed_up()
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a process that a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def slow(*values: Any) -> list[Any]:
    """Return parameters that only slow tests use."""
    return [pytest.param(value, marks=pytest.mark.slow, id=str(value)) for value in values]


def slow_rows(*rows: Sequence[Any]) -> list[Any]:
    """Return rows of several parameters that only slow tests use."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


@pytest.fixture
def replays_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers be replayed as CUDA graphs, by a stand-in if there is no GPU."""
    if not HAS_GPU:
        from fused_norm.patcher import cuda_graphs, survey

        from .patcher.graph_stand_in import StandIn

        monkeypatch.setattr(cuda_graphs, "make_device", StandIn)
        monkeypatch.setattr(survey, "why_no_graphs", lambda devices: None)


@pytest.fixture
def replays_hand_out_their_memory(replays_anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: gradients lie in the memory of graphs, which the next replay overwrites."""
    from fused_norm.patcher import cuda_graphs

    def aliases(grads: Sequence[Any]) -> list[Any]:
        return [None if grad is None else grad.detach() for grad in grads]

    pairs: Any = inspect.getmodule(vars(cuda_graphs)["GraphPair"])
    gradients = inspect.getmodule(pairs.copies_of)
    monkeypatch.setattr(pairs, "copies_of", aliases)
    monkeypatch.setattr(gradients, "_FLAT", -1)  # bytes of small gradients that are copied together


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lives to the end: all that was imported and collected."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(count=1): needs that many CUDA devices")
    # The interpreter computes with numpy, which warns about every NaN and inf in the inputs.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available = torch.cuda.device_count() if HAS_GPU else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.args[0] if marker.args else 1
        if available < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {available}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the rewritten forwards of models that the failing test holds to its report."""
    report = yield
    if report.when == "call" and report.failed and call.excinfo is not None:
        values = [value for entry in call.excinfo.traceback for value in entry.frame.f_locals.values()]
        modules = [module for value in values if isinstance(value, torch.nn.Module) for module in value.modules()]
        forwards = [inspect.unwrap(getattr(type(module), "forward", None)) for module in modules]
        files = [forward.__code__.co_filename for forward in forwards if hasattr(forward, "__code__")]
        for file in [file for file in dict.fromkeys(files) if file.startswith("<fused_norm ")][:2]:
            report.sections.append((file, "".join(linecache.getlines(file)[:40])))
    return report


@pytest.fixture(scope="session")
def device() -> str:
    """The device of test tensors: ``cuda`` if there is a GPU, else ``cpu``, on which kernels are interpreted."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _in_full_precision():
    """Restore the precision of fp32 products: the Trainer's ``torch_compile`` turns on TF32 for the process."""
    backends = (torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [getattr(backend, "fp32_precision", None) for backend in backends]
    yield
    for backend, precision in zip(backends, before, strict=True):
        if precision is not None and backend.fp32_precision != precision:
            backend.fp32_precision = precision


@pytest.fixture(autouse=True)
def _with_the_precision_of_the_launcher():
    """Restore the environment's mixed precision: transformers 4 writes that of each Trainer there."""
    before = os.environ.get("ACCELERATE_MIXED_PRECISION")
    yield
    if before is None:
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    else:
        os.environ["ACCELERATE_MIXED_PRECISION"] = before


@pytest.fixture
def large_graphs():
    """Keep operators in compiled graphs, under autocast too and for tensors as small as those of tests.

    What earlier tests have compiled is forgotten: it counts towards the limit at which Dynamo stops compiling a
    function.
    """
    from fused_norm.kernels.compiler_policy import force_fused_in_graphs

    torch._dynamo.reset()
    with force_fused_in_graphs():
        yield
