"""Plan files: what one says is what is planned, what it cannot say is an error that names the place and the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fused_norm.kernels import plan_files, plans
from fused_norm.kernels.plans import BackwardPlan, Device, ForwardPlan, GluSize, HeadsSize, PlanTable, Provenance
from fused_norm.kernels.triton.devices import facts_of, planned_by
from fused_norm.spec import PlanFileError

MADE = Provenance("NVIDIA H100 80GB HBM3", "9.0", "0.1.0", "2.13.0", "3.7.1", "2026-11-22")
ROWS = {
    "forward": {
        1024: ForwardPlan("static_persistent", 4, 1024, 4, 528),
        2560: ForwardPlan("multi_wave_cached", 1, 4096, 4),
    },
    "norm_backward": {5120: BackwardPlan(1, 4096, 8, 2, 132, reload=True, tail=1024)},
    "add_backward": {20000: BackwardPlan(4, 1024, 4, 2, 132, chunked=True)},
    "sandwich_backward": {2048: BackwardPlan(1, 2048, 8, 4, 264)},
    "heads_forward": {128: HeadsSize(4096, 4)},
    "qk_backward": {128: HeadsSize(2048, 2, 2, 396)},
    "qk_rope_backward": {128: HeadsSize(1024, 2, 2, 528)},
    "rope": {128: HeadsSize(512, 1)},
    "glu_forward": {None: GluSize(4096, 8)},
    "glu_backward": {None: GluSize(2048, 8)},
}
TABLE = PlanTable(MADE, ROWS)  # type: ignore[arg-type]
H100 = Device(table=TABLE)
SHIPPED = sorted(plan_files.SHIPPED.glob("*.toml"))
TEXT = plan_files.as_text(TABLE, {("rope", 128): 'faster "here"\n by half'})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of plans, empty, and no variable that says otherwise."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in (plan_files.VARIABLE, plan_files.ANY_DEVICE):
        monkeypatch.delenv(name, raising=False)
    folder = plan_files.user_folder()
    assert folder == tmp_path / "fused_norm" / "plans"
    folder.mkdir(parents=True)
    return folder


def test_a_file_says_what_its_table_says(tmp_path: Path) -> None:
    assert ROWS.keys() == set(plans.SECTIONS), "every section is tested"
    path = tmp_path / "plans.toml"
    path.write_text(TEXT, encoding="utf-8")
    found = plan_files.load(path, Device())
    assert (found.provenance, found.rows) == (MADE, ROWS)
    assert r'why = "faster \"here\"  by half"' in TEXT


def test_rows_go_before_the_rules_at_their_own_widths_alone() -> None:
    for width in (1024, 2560):
        row = ROWS["forward"][width]
        assert plans.forward_plan(width, H100) == row
        assert plans.forward_plan(width + 1, H100) == plans.forward_plan(width + 1)
    assert plans.backward_plan(5120, 6, H100) == ROWS["norm_backward"][5120] != plans.backward_plan(5120, 6)
    assert plans.backward_plan(5120, 6, H100, summed=True) == plans.backward_plan(5120, 6, summed=True)
    assert plans.backward_plan(20000, 8, H100, summed=True) == ROWS["add_backward"][20000]
    assert plans.sandwich_backward_plan(2048, 12, H100) == ROWS["sandwich_backward"][2048]
    assert plans.heads_forward_size(128, 0, H100, normed=True) == plans.heads_forward_size(128, 128, H100, normed=True)
    assert plans.heads_forward_plan(32, 8, 128, 0, H100).q == plans.HeadsTile(1, 32)
    assert plans.heads_backward_plan(32, 8, 128, 0, 4, 0, H100).programs == 396
    assert plans.heads_backward_plan(32, 8, 128, 128, 4, 4, H100).programs == 528
    assert plans.heads_forward_plan(32, 8, 128, 128, H100, normed=False).q == plans.HeadsTile(1, 4)
    assert plans.heads_forward_plan(32, 8, 64, 0, H100) == plans.heads_forward_plan(32, 8, 64, 0)
    assert plans.glu_plan(None, False, H100) == plans.GluPlan(1, 4096, 8)
    assert plans.glu_plan(512, True, H100) == plans.GluPlan(4, 512, 8)


def test_all_forwards_of_a_width_share_its_row() -> None:
    """So the same norm has the same bits by itself, with its add, in a sandwich and in FP8, whatever the file says."""
    for width, row in ROWS["forward"].items():
        held = replace(row, mode="multi_wave_cached", programs=0)
        assert plans.forward_plan(width, H100, "multi_wave_cached") == held
        assert plans.forward_plan(width, H100, "static_persistent").rows == row.rows
        assert plans.forward_plan(width, H100, "static_persistent").warps == row.warps
        assert plans.sandwich_forward_plan(width, H100) == held


def test_a_row_has_fewer_tiles_in_flight_where_shared_memory_is_short() -> None:
    small = replace(H100, shared_memory=60_000)
    assert plans.sandwich_backward_plan(2048, 12, small) == replace(ROWS["sandwich_backward"][2048], stages=3)
    assert plans.backward_plan(5120, 12, small).stages == 1


HEADER = TEXT[: TEXT.index("[[forward]]")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("[[forward]]\nwidth = 64\n", "row 1 of [[forward]]: mode is missing"),
        ("[[foward]]\nwidth = 64\n", "there is no section [[foward]], only forward, norm_backward,"),
        ("[forward]\nwidth = 64\n", "there is no section [[forward]]"),
        ("[[glu_forward]]\nelements = 2048\nwarps = 3\n", "row 1 of [[glu_forward]]: warps = 3 is not a power of two"),
        ("[[glu_forward]]\nelements = 2048\nwarps = 64\n", "warps = 64 are more than 1024 lanes"),
        ("[[glu_forward]]\nelements = 2048\nwarps = '4'\n", "warps = '4' is no number from 0 on"),
        ("[[glu_forward]]\nelements = 2048\nwarps = true\n", "warps = True is no number from 0 on"),
        ("[[glu_forward]]\nelements = 65536\nwarps = 4\n", "a tile of 65536 elements is more than the 32768"),
        ("[[glu_forward]]\nelements = 64\nwarps = 4\nwidth = 7\n", "width = 7: a gate's plan has no width"),
        ("[[rope]]\nelements = 64\nwarps = 4\n", "width = None is no number from 1 to 32768"),
        ("[[rope]]\nwidth = 64\nelements = 64\nwarps = 4\nfaster = 1\n", "there is no field 'faster', only width, "),
        ("[[qk_backward]]\nwidth = 64\nelements = 64\nwarps = 4\n", "programs = 0: this backward needs one"),
        ("[[qk_backward]]\nwidth = 64\nelements = 64\nwarps = 4\nprograms = 9\nstages = 99\n", "stages = 99 is not "),
        ("[[rope]]\nwidth = 64\nelements = 64\nwarps = 4\n" * 2, "row 2 of [[rope]]: width = 64 is there twice"),
        ("rope = [1]", "row 1 of [[rope]]: 1 is no row"),
        ("[[rope]]\nwidth =", "is no TOML"),
    ],
)  # fmt: skip
def test_an_impossible_file_names_the_row_the_value_and_the_way_out(rows: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.toml"
    text = rows + "\n" + HEADER if rows.startswith("rope") else HEADER + rows
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanFileError) as raised:
        plan_files.load(path, Device())
    for part in (str(path), said, "fused-norm bench --tune", "FUSED_NORM_PLANS=built-in"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("section", "width", "plan", "said"),
    [
        ("forward", 80, ForwardPlan("multi_wave_reload", 1, 128, 4), "is none of static_persistent, multi_wave_cached"),
        ("forward", 80, ForwardPlan("multi_wave_cached", 1, 64, 4), "block = 64 is not 128, which holds a row of 80"),
        ("forward", 80, ForwardPlan("multi_wave_cached", 1, 128, 4, 8), "static_persistent alone has a number of them"),
        ("norm_backward", 80, BackwardPlan(1, 64, 4, 2, 8), "block = 64 and tail = 0 do not hold a row of 80"),
        ("norm_backward", 80, BackwardPlan(1, 64, 4, 2, 8, tail=64), "tail = 64 is no power of two below block"),
        ("add_backward", 80, BackwardPlan(1, 64, 4, 2, 8, tail=32), "or this section has none"),
        ("norm_backward", 80, BackwardPlan(1, 64, 4, 2, 8, chunked=True), "chunked = True: rows of more than 16384"),
        ("norm_backward", 16385, BackwardPlan(1, 32768, 32, 2, 8), "chunked = False: rows of more than 16384"),
        ("norm_backward", 20000, BackwardPlan(1, 64, 4, 2, 8, True, True), "chunked rows have no tail and no reload"),
        ("norm_backward", 80, BackwardPlan(1, 128, 4, 2, 70_000), "programs = 70000 are more than 65535"),
    ],
)  # fmt: skip
def test_plans_that_no_kernel_takes_are_refused(section: str, width: int, plan: object, said: str) -> None:
    (problem,) = plan_files.problems(section, width, plan, Device())  # type: ignore[arg-type]
    assert said in problem


@pytest.mark.parametrize(("section", "width"), [("forward", 16385), ("sandwich_backward", 8193), ("forward", 0)])
def test_widths_that_one_kernel_cannot_hold_are_refused(section: str, width: int, tmp_path: Path) -> None:
    kind = "mode = 'multi_wave_cached'\n" if section == "forward" else "stages = 1\nprograms = 1\n"
    path = tmp_path / "plans.toml"
    path.write_text(f"{HEADER}[[{section}]]\nwidth = {width}\nrows = 1\nblock = 32768\nwarps = 32\n{kind}")
    with pytest.raises(PlanFileError, match=rf"width = {width} is no number from 1 to"):
        plan_files.load(path, Device())


@pytest.mark.parametrize("header", ["", "[made]\ndevice = 'x'\n", HEADER.replace('"9.0"', "9.0"), "made = 3\n"])
def test_a_file_must_say_where_it_was_made(header: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.toml"
    path.write_text(header)
    with pytest.raises(PlanFileError, match=r"\[made\] must have the strings device, capability, fused_norm, torch"):
        plan_files.load(path, Device())


def test_a_device_takes_its_own_file_or_the_rules_and_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(name: str, capability: str = "9.0") -> tuple[str, bool]:
        chosen = plan_files.choose(name, capability, Device())
        return chosen.why, chosen.table is plans.BUILT_IN

    assert why("NVIDIA H200") == ("built in: measured on this device", True)
    assert "it has the same architecture (9.0) as NVIDIA H200" in why("NVIDIA H100 PCIe")[0]
    assert "nothing was measured on this device or its architecture" in why("NVIDIA A100", "8.0")[0]
    assert "nothing was measured" in why("cpu", "")[0]
    path = home / "NVIDIA_H100_80GB_HBM3.toml"
    path.write_text(TEXT)
    chosen = plan_files.choose(MADE.device, "9.0", Device())
    assert (chosen.table.rows, chosen.why, chosen.path) == (ROWS, "the user's, measured on this device", path)
    assert why("NVIDIA H200")[1], "another device's file is not looked at"
    monkeypatch.setenv(plan_files.VARIABLE, "built-in")
    said, built_in = why(MADE.device)
    assert built_in
    assert said.startswith("built in, asked for by FUSED_NORM_PLANS")
    shipped = home.parent
    monkeypatch.delenv(plan_files.VARIABLE)
    monkeypatch.setattr(plan_files, "SHIPPED", shipped)
    (shipped / path.name).write_text(TEXT)
    assert plan_files.choose(MADE.device, "9.0", Device()).path == path, "the user's goes before the package's"
    path.unlink()
    assert why(MADE.device) == ("shipped, measured on this device", False)


def test_a_file_of_another_device_is_refused_unless_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / "mine.toml"
    path.write_text(TEXT)
    monkeypatch.setenv(plan_files.VARIABLE, str(path))
    assert plan_files.choose(MADE.device, "9.0", Device()).why == "named by FUSED_NORM_PLANS, measured on this device"
    with pytest.raises(PlanFileError, match=r"mine\.toml: made for 'NVIDIA H100 80GB HBM3', and this device is 'cpu'"):
        plan_files.choose("cpu", "", Device())
    monkeypatch.setenv(plan_files.ANY_DEVICE, "1")
    assert "which FUSED_NORM_PLANS_ANY_DEVICE allows" in plan_files.choose("cpu", "", Device()).why
    monkeypatch.setenv(plan_files.VARIABLE, str(home / "none.toml"))
    with pytest.raises(PlanFileError, match=r"none\.toml cannot be read \(No such file"):
        plan_files.choose("cpu", "", Device())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_named_for_their_device_and_have_possible_rows(path: Path) -> None:
    assert plan_files.file_name(plan_files.load(path, Device()).provenance.device) == path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [None, *sorted(plan_files.SHIPPED.glob("*.toml"))], ids=lambda path: path and path.stem
)
def test_plans_fit_an_h100_in_shared_memory_and_in_registers(path: Path | None) -> None:
    script = Path(__file__).with_name("compiled_plans.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, *([] if path is None else [path])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert path is not None or len(done.stdout.splitlines()) > 50


def test_a_table_is_in_force_inside_a_context_alone() -> None:
    cpu = torch.device("cpu")
    before = facts_of(cpu)
    with planned_by(TABLE):
        assert facts_of(cpu) == replace(before, table=TABLE)
        with planned_by(plans.BUILT_IN):
            assert facts_of(cpu) == before
        assert facts_of(cpu).table is TABLE
    assert facts_of(cpu) == before
