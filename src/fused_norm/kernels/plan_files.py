"""Plan tables as files: ``fused-norm bench --tune`` writes them, and a device takes the one that was made for it.

The place of a file, in the order of looking: the environment variable ``FUSED_NORM_PLANS``, which names a file or says
``built-in``; the folder ``fused_norm/plans`` of the user's configuration; the tables that this package ships. A file is
TOML: a table ``made`` with the ``Provenance``, and a list of rows for each section, whose fields are those of its plan.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..spec import PlanFileError
from .plans import (
    BUILT_IN,
    MODES,
    SECTIONS,
    WIDEST_BACKWARD,
    WIDEST_FORWARD,
    WIDEST_SANDWICH_BACKWARD,
    WIDEST_SANDWICH_FORWARD,
    BackwardPlan,
    Device,
    ForwardPlan,
    GluSize,
    HeadsSize,
    PlanTable,
    Provenance,
    Section,
    next_power_of_2,
)

VARIABLE = "FUSED_NORM_PLANS"
"""The environment variable that names a file, or says ``built-in``."""

ANY_DEVICE = "FUSED_NORM_PLANS_ANY_DEVICE"
"""The environment variable that, set to 1, lets a device take a file that was made for another."""

SHIPPED = Path(__file__).parent / "plan_tables"

PLAN_TYPES: dict[Section, type] = {
    "forward": ForwardPlan,
    "norm_backward": BackwardPlan,
    "add_backward": BackwardPlan,
    "sandwich_backward": BackwardPlan,
    "heads_forward": HeadsSize,
    "qk_backward": HeadsSize,
    "qk_rope_backward": HeadsSize,
    "rope": HeadsSize,
    "glu_forward": GluSize,
    "glu_backward": GluSize,
}
_WIDEST: dict[Section, int] = {
    "forward": WIDEST_SANDWICH_FORWARD,  # what all forwards can hold, because they share the row
    "norm_backward": 2**20,
    "add_backward": 2**20,
    "sandwich_backward": WIDEST_SANDWICH_BACKWARD,
    "heads_forward": WIDEST_FORWARD,
    "qk_backward": WIDEST_FORWARD,
    "qk_rope_backward": WIDEST_FORWARD,
    "rope": WIDEST_FORWARD,
}
_POWERS_OF_2 = ("rows", "block", "warps", "elements")
_MOST_LANES = 1024
_MOST_STAGES = 8
_MOST_PROGRAMS = 65_535


@dataclass(frozen=True)
class ChosenTable:
    """The plans that a device takes.

    Attributes:
        table: before the rules of ``plans``.
        why: this table, in words.
        path: of its file; None where the rules are all there is.
    """

    table: PlanTable
    why: str
    path: Path | None = None


def user_folder() -> Path:
    """The folder in which a user keeps plan files, one for each kind of device."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # which never raises
    return Path(base) / "fused_norm" / "plans"


def file_name(device: str) -> str:
    """The name of the file for a kind of device: ``NVIDIA H100 80GB HBM3`` is ``NVIDIA_H100_80GB_HBM3.toml``."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device).strip("_") + ".toml"


def choose(name: str, capability: str, device: Device) -> ChosenTable:
    """The table for a device.

    Args:
        name: of the device, as its driver gives it.
        capability: of its architecture.
        device: its facts, that plans must fit.

    Raises:
        PlanFileError: the file that it would take cannot be read, has an impossible row, or is another device's.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked and asked != "built-in":
        return _taken(Path(asked), name, device, f"named by {VARIABLE}")
    if not asked:
        for folder, whose in ((user_folder(), "the user's"), (SHIPPED, "shipped")):
            path = folder / file_name(name)
            if os.path.isfile(path):  # False also in a folder that may not be read
                return _taken(path, name, device, whose)
    measured = BUILT_IN.provenance
    if name == measured.device:
        why = "measured on this device"
    elif capability and capability == measured.capability:
        why = f"this device's own were not measured; it has the same architecture ({capability}) as {measured.device}"
    else:
        why = "nothing was measured on this device or its architecture; `fused-norm bench --tune` does"
    return ChosenTable(BUILT_IN, f"built in{f', asked for by {VARIABLE}' if asked else ''}: {why}")


def _taken(path: Path, name: str, device: Device, whose: str) -> ChosenTable:
    table = load(path, device)
    made_for = table.provenance.device
    if made_for == name:
        return ChosenTable(table, f"{whose}, measured on this device", path)
    if os.environ.get(ANY_DEVICE) == "1":
        return ChosenTable(table, f"{whose}, measured on another device, which {ANY_DEVICE} allows", path)
    raise PlanFileError(
        f"{path}: made for {made_for!r}, and this device is {name!r}; measure this one with `fused-norm bench --tune`, "
        f"or take the file all the same with {ANY_DEVICE}=1, or go without it with {VARIABLE}=built-in"
    )


def load(path: Path, device: Device) -> PlanTable:
    """Read a plan file.

    Args:
        path: of the file.
        device: the facts that plans must fit.

    Raises:
        PlanFileError: it cannot be read, or has a row that no kernel can take.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(f"{path} cannot be read ({error.strerror}); mend the path or unset {VARIABLE}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanFileError(f"{path} is no TOML: {error}; {_way_out()}") from error
    made = data.pop("made", None)
    names = [field.name for field in fields(Provenance)]
    if (
        not isinstance(made, dict)
        or sorted(made) != sorted(names)
        or not all(isinstance(v, str) for v in made.values())
    ):
        raise PlanFileError(f"{path}: [made] must have the strings {', '.join(names)}; {_way_out()}")
    rows: dict[Section, dict[int | None, Any]] = {}
    for name, entries in data.items():
        section = next((one for one in SECTIONS if one == name), None)
        if section is None or not isinstance(entries, list):
            raise PlanFileError(f"{path}: there is no section [[{name}]], only {', '.join(SECTIONS)}; {_way_out()}")
        found = rows[section] = {}
        for number, entry in enumerate(entries, 1):
            place = f"{path}: row {number} of [[{section}]]"
            try:
                width, plan = _parsed(section, entry, device)
                if width in found:
                    raise ValueError(f"width = {width!r} is there twice")
            except ValueError as error:
                raise PlanFileError(f"{place}: {error}; {_way_out()}") from None
            found[width] = plan
    return PlanTable(Provenance(**made), rows)


def _way_out() -> str:
    return f"mend it, measure again with `fused-norm bench --tune`, or go without it with {VARIABLE}=built-in"


def _parsed(section: Section, entry: Any, device: Device) -> tuple[int | None, Any]:
    """The width and the plan of a row.

    Raises:
        ValueError: for a field or a value that is none.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} is no row")
    values = {name: value for name, value in entry.items() if name != "why"}
    width = values.pop("width", None)
    kind = PLAN_TYPES[section]
    known = {field.name: field for field in fields(kind)}
    for name in values:
        if name not in known:
            raise ValueError(f"there is no field {name!r}, only {', '.join(['width', *known, 'why'])}")
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise ValueError(f"{name} is missing")
    for name, value in values.items():
        expected = {"int": int, "bool": bool}.get(str(known[name].type), str)
        if type(value) is not expected or (isinstance(value, int) and value < 0):
            raise ValueError(f"{name} = {value!r} is no {'number from 0 on' if expected is int else expected.__name__}")
    _check_width(section, width)
    plan = kind(**values)
    for problem in problems(section, width, plan, device):
        raise ValueError(problem)
    return width, plan


def _check_width(section: Section, width: Any) -> None:
    if PLAN_TYPES[section] is GluSize:
        if width is not None:
            raise ValueError(f"width = {width!r}: a gate's plan has no width")
    elif type(width) is not int or not 1 <= width <= _WIDEST[section]:
        raise ValueError(f"width = {width!r} is no number from 1 to {_WIDEST[section]}")


def problems(section: Section, width: int | None, plan: Any, device: Device) -> Iterator[str]:
    """Yields why no kernel could launch a row's plan, or not with a right result, in words."""
    values = asdict(plan)
    for name in _POWERS_OF_2:
        if name in values and (values[name] < 1 or values[name] != next_power_of_2(values[name])):
            yield f"{name} = {values[name]} is not a power of two"
    if plan.warps * device.warp_size > _MOST_LANES:
        yield f"warps = {plan.warps} are more than {_MOST_LANES} lanes"
    if not 1 <= values.get("stages", 1) <= _MOST_STAGES:
        yield f"stages = {plan.stages} is not between 1 and {_MOST_STAGES}"
    if values.get("programs", 0) > _MOST_PROGRAMS:
        yield f"programs = {plan.programs} are more than {_MOST_PROGRAMS}"
    persistent = section.endswith("_backward") and "stages" in values
    if persistent and plan.programs < 1:
        yield "programs = 0: this backward needs one"
    elements = values["rows"] * values["block"] if "rows" in values else values["elements"]
    if elements > WIDEST_FORWARD:
        yield f"a tile of {elements} elements is more than the {WIDEST_FORWARD} that registers hold"
    if isinstance(plan, ForwardPlan):
        held = [mode for mode in MODES if mode != "multi_wave_reload"]
        if plan.mode not in held:
            yield f"mode = {plan.mode!r} is none of {', '.join(held)}"
        if plan.block != next_power_of_2(width or 0):
            yield f"block = {plan.block} is not {next_power_of_2(width or 0)}, which holds a row of {width}"
        if (plan.programs > 0) != (plan.mode == "static_persistent"):
            yield f"programs = {plan.programs} with mode = {plan.mode!r}: static_persistent alone has a number of them"
    if isinstance(plan, BackwardPlan):
        yield from _problems_of_a_backward(section, width or 0, plan)


def _problems_of_a_backward(section: Section, width: int, plan: BackwardPlan) -> Iterator[str]:
    if plan.chunked != (width > WIDEST_BACKWARD):
        yield f"chunked = {plan.chunked}: rows of more than {WIDEST_BACKWARD} elements are read in chunks, others not"
    if plan.chunked and (plan.tail or plan.reload):
        yield "chunked rows have no tail and no reload"
    if not plan.chunked and plan.columns < width:
        yield f"block = {plan.block} and tail = {plan.tail} do not hold a row of {width}"
    if plan.tail and (section != "norm_backward" or plan.tail != next_power_of_2(plan.tail) or plan.tail >= plan.block):
        yield f"tail = {plan.tail} is no power of two below block, or this section has none"


def as_text(table: PlanTable, reasons: Mapping[tuple[Section, int | None], str]) -> str:
    """The file of a table.

    Args:
        table: to write.
        reasons: in words, by section and width; they are kept beside the rows for those who read the file.
    """
    lines = ["# Launch plans, measured by `fused-norm bench --tune`.", "", "[made]"]
    lines += [f"{name} = {_literal(value)}" for name, value in asdict(table.provenance).items()]
    for section in SECTIONS:
        for width, plan in table.rows.get(section, {}).items():
            values = ({} if width is None else {"width": width}) | asdict(plan)
            if (section, width) in reasons:
                values["why"] = reasons[section, width]
            lines += ["", f"[[{section}]]", *(f"{name} = {_literal(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _literal(value: str | int | bool) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(rf"\{one}" if one in '"\\' else one if one.isprintable() else " " for one in value) + '"'
