"""The row of a model in the table of families, from its config and its report, and the places that want its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, astuple, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from ..model_configs import FAMILIES, Family, Shape
from ..model_configs.families import _tiny
from ..spec import KINDS, Kind, NormSpec
from .common import UsageError, in_one_line

if TYPE_CHECKING:
    from ..patcher import PatchReport, Site

_SMALL: Mapping[str, int] = {
    "head_dim": 24,
    "global_head_dim": 24,
    "intermediate_size": 136,
    "sliding_window": 16,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
}
"""Sizes of a tiny model, for those of these arguments that a config has."""

_NEWER: tuple[Kind, ...] = ("conv", "experts")
"""Kinds of sites that models of older releases of transformers may lack."""

PLACES: Mapping[str, str] = {
    "src/fused_norm/model_configs/families.py": "the row, in _FAMILIES",
    "tests/patcher/reports": "its report: python -m tests.patcher.test_reports",
    "tests/model_configs/test_model_configs.py": "what is special to it; a published shape",
    "tests/convergence/test_suite.py": "_TRAINED: the precision that a test trains it in",
    "docs/supported.md": "its sites; other models lose its row",
    "docs/convergence.md": "the number of families",
    "README.md": "the list of families",
    "CHANGELOG.md": "a line",
}
"""The files that want the name of a new family, and what they say of it."""


def row_of(model: nn.Module, config: Any, report: PatchReport, name: str | None) -> Iterator[str]:
    """Yield what goes into the table of families, with what it cannot say in comments, and where its name goes.

    Args:
        model: is patched with the default options.
        config: the model's.
        report: on it.
        name: the name of a published model, of which the row gets the shape; None for none.

    Raises:
        UsageError: no norm of a decoder is fused.
    """
    text = config.get_text_config()
    layers, outside = _sites_by_layer(model, text.model_type, report)
    specs = Counter(site.spec for rows in (*layers, outside) for site in rows if type(site.spec) is NormSpec)
    if not specs:
        raise UsageError(f"no norm of a decoder is fused in {report.model}, so it has no row")
    (spec, _), *others = specs.most_common()
    yield from (f"# other norms: {count} compute {other}" for other, count in others)
    yield from (f"# not in the row: {site.path} ({site.kind}): {site.reason}" for site in report.kept)
    types = list(getattr(text, "layer_types", None) or ())
    of_type: dict[str, dict[str, Mapping[Kind, int]]] = {}
    for index, rows in enumerate(layers):
        sites = _numbers_of(rows)
        if of_type.setdefault(types[index] if types else "", sites) != sites:
            yield f"# layer {index} differs from others of its type: see last_layers and variant in Family's docstring"
    usual = max(of_type.values(), key=lambda sites: sum(map(len, sites.values())))
    values = text.to_dict()
    row = Family(
        model_type=text.model_type,
        spec=spec,
        tiny=_tiny_model_of(text, spec),
        shapes=() if name is None else (Shape(name, *(values.get(field.name) for field in fields(Shape)[1:])),),
        layer_sites=usual["layer_sites"],
        newer_sites=usual["newer_sites"],
        layers_of_type={
            name: {which: numbers for which, numbers in sites.items() if numbers != usual[which]}
            for name, sites in of_type.items()
            if sites != usual
        },
        decoder_norms=sum(site.kind == "norm" for site in outside),
    )
    yield f"{_as_code(row)},\n"
    yield _verdict_of_tiny_model(row)
    known = "is in the table" if row.model_type in FAMILIES else "is not in the table yet"
    yield f"{row.model_type} {known}. Its name goes into\n"
    width = max(map(len, PLACES))
    yield from (f"  {path:<{width}}  {what}" for path, what in PLACES.items())


def _sites_by_layer(model: nn.Module, model_type: str, report: PatchReport) -> tuple[list[list[Site]], list[Site]]:
    """The fused sites in each layer of the decoder of this type, and those of the decoder outside of them."""
    for path, decoder in model.named_modules():
        layers, config = getattr(decoder, "layers", None), getattr(decoder, "config", None)
        if isinstance(layers, nn.ModuleList) and getattr(config, "model_type", None) == model_type:
            start = f"{path}." if path else ""
            sites = [site for site in report.fused if site.path.startswith(start) and site.kind != "loss"]
            inside: list[list[Site]] = [[] for _ in layers]
            for site in sites:
                if site.path.startswith(f"{start}layers."):
                    inside[int(site.path.removeprefix(f"{start}layers.").partition(".")[0])].append(site)
            return inside, [site for site in sites if not site.path.startswith(f"{start}layers.")]
    return [], []


def _numbers_of(rows: Iterable[Site]) -> dict[str, Mapping[Kind, int]]:
    """The numbers of sites of a layer, as arguments of ``Family``."""
    numbers = Counter(site.kind for site in rows)
    return {
        "layer_sites": {kind: numbers[kind] for kind in KINDS if numbers[kind] and kind not in _NEWER},
        "newer_sites": {kind: numbers[kind] for kind in _NEWER if numbers[kind]},
    }


def _tiny_model_of(config: Any, spec: NormSpec) -> Mapping[str, Any]:
    """The arguments of a tiny config of the type of this one."""
    values, usual = config.to_dict(), _tiny()
    tiny: dict[str, Any] = {name: small for name, small in _SMALL.items() if isinstance(values.get(name), int)}
    types = list(dict.fromkeys(values.get("layer_types") or ()))
    if len(types) > 1:
        tiny |= {"num_hidden_layers": len(types), "layer_types": types}
    tiny["tie_word_embeddings"] = bool(values.get("tie_word_embeddings"))
    epsilons = (name for name, value in values.items() if "eps" in name and isinstance(value, float))
    tiny |= {name: spec.eps for name in epsilons if name != "rms_norm_eps"}
    for token, name in enumerate(("pad_token_id", "eos_token_id", "bos_token_id")):
        if isinstance(values.get(name), int) and values[name] >= usual["vocab_size"]:
            tiny[name] = token
    return _tiny(**tiny)


def _verdict_of_tiny_model(row: Family) -> str:
    """Return in words whether the tiny model of a row has the sites that the row claims."""
    from transformers import AutoConfig

    from ..model_configs import build
    from ..patcher import apply_fused_norm

    try:
        model = build(AutoConfig.for_model(row.model_type, **row.tiny_arguments({})), seed=0)
    except Exception as error:
        return f"Its tiny model cannot be built, so change tiny: {in_one_line(error)}"
    found = {kind: count for kind, count in apply_fused_norm(model, strict=False).counts.items() if count}
    if found != row.sites():
        return f"Its tiny model has other sites than the row claims: {found}, not {row.sites()}."
    return f"Its tiny model has the sites that the row claims: {', '.join(f'{n} {kind}' for kind, n in found.items())}."


def _as_code(row: Family) -> str:
    """A row as it stands in the table."""
    given: dict[str, str] = {}
    for field in fields(Family):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if (value := getattr(row, field.name)) != default:
            given[field.name] = repr(value)
    usual = _tiny()
    tiny = {name: repr(value) for name, value in row.tiny.items() if usual.get(name) != value}
    given |= {"spec": _spec_as_code(row.spec), "tiny": _call("_tiny", tiny, indent=4)}
    if row.shapes:
        given["shapes"] = "({},)".format(", ".join(f"Shape{astuple(shape)}" for shape in row.shapes))
    return _call("Family", given, indent=0)


def _spec_as_code(spec: NormSpec) -> str:
    given = [f'"{spec.casting}"', "zero_centered=True" * spec.zero_centered, "weighted=False" * (not spec.weighted)]
    given += [f"eps={spec.eps:g}".replace("e-0", "e-"), "casts_weight=False" * (not spec.casts_weight)]
    return f"NormSpec({', '.join(filter(None, given))})"


def _call(function: str, arguments: Mapping[str, str], indent: int) -> str:
    """A call with keyword arguments, each in a line of its own if they do not fit into one."""
    given = [f"{name}={value}" for name, value in arguments.items()]
    if len(line := f"{function}({', '.join(given)})") < 80:
        return line.replace("'", '"')
    lines = [f"{function}(", *(f"{' ' * (indent + 4)}{value}," for value in given), f"{' ' * indent})"]
    return "\n".join(lines).replace("'", '"')
