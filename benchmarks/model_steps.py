"""The steps of whole models that are timed: training steps of several kinds, and generation, with random weights."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fused_norm.patcher import apply_fused_norm, remove_fused_norm
from fused_norm.spec import GatedNormSpec, NormSpec

from .model_cases import ModelCase

ALLOWED_ERROR = 0.2
"""Relative error to stock that a variant may have in its outputs and in the gradients of weights. In bf16 over dozens
of layers two correct implementations differ by 0.02 to 0.06, and one that is wrong by about one."""

_PROMPT_TOKENS = 16
_PACKED_SEQUENCES = 8  # In one row, of unequal lengths.
_LORA_RANK = 16

Model = TypeVar("Model", bound=nn.Module)
Step = TypeVar("Step", bound="BenchmarkedModel")


def twin_of(model: Model) -> Model:
    """A copy of a model that shares all parameters and buffers with it, so that it costs no memory on the device."""
    shared = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


@dataclass(frozen=True)
class BenchmarkedModel:
    """A model and the inputs of its training step.

    Attributes:
        model: without a head, in training mode.
        tokens: [batch, length].
        gradient: of the last hidden state, [batch, length, hidden size]: the backward starts from it.
        norms: the paths of all norms, with what they compute.
        watched: the paths of the parameters whose gradients are held against stock's.
        inputs: further arguments of the model.
        autocast: the dtype of autocast; None for none.
    """

    model: Any
    tokens: Tensor
    gradient: Tensor
    norms: Mapping[str, NormSpec]
    watched: Sequence[str] = ()
    inputs: Mapping[str, Any] | None = None
    autocast: torch.dtype | None = None

    shares_weights = True
    """A twin uses the parameters of the model it was made from; sharded ones have their own."""

    @property
    def parts(self) -> int:
        """The number that a step's time is divided by for the tables: 1, or a generation's tokens in each sequence."""
        return 1

    def twin(self: Step) -> Step:
        """Copy the step, with a model that a variant may change and that shares the weights of this one."""
        return replace(self, model=twin_of(self.model))

    def place(self) -> None:
        """Make the changed model ready where it takes more than its weights: see ``ShardedModel``."""

    def forward_backward(self, model: Any = None) -> Tensor:
        """Run forward and backward, without vocabulary or loss, and return the last hidden state.

        Args:
            model: what to call instead of the model itself, such as its compiled form.
        """
        model = self.model if model is None else model
        with self._autocast():
            hidden = model(input_ids=self.tokens, use_cache=False, **(self.inputs or {})).last_hidden_state
        # A copy, because Liger's norms write into the gradient that they are given.
        hidden.backward(self.gradient.to(hidden.dtype, copy=True))
        return hidden

    def drop_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        self.model.zero_grad(set_to_none=True)

    def step(self, model: Any = None) -> None:
        """Run one step as it is timed."""
        self.forward_backward(model)
        self.drop_gradients()

    def outputs_and_gradients(self, model: Any = None) -> list[Tensor]:
        """The output and the gradients of what is watched, a vector each, to be compared with stock's."""
        output = self.forward_backward(model).detach().flatten()
        weights = [self.model.get_parameter(path) for path in self.watched]
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        whole = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
        self.drop_gradients()
        return [output.float().cpu(), torch.cat([gradient.flatten().float() for gradient in whole]).cpu()]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.tokens.device.type, self.autocast)


@dataclass(frozen=True)
class WholeTrainingStep(BenchmarkedModel):
    """A training step with head, cross-entropy loss and optimizer.

    Attributes:
        optimizer: with a learning rate of 0: it works as much, and the weights stay what they are for every variant.
    """

    optimizer: torch.optim.Optimizer | None = None

    def forward_backward(self, model: Any = None) -> Tensor:
        """Run forward and backward from the loss, and return the loss."""
        loss = (self.model if model is None else model)(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def step(self, model: Any = None) -> None:
        """Run one step as it is timed."""
        assert self.optimizer is not None
        self.forward_backward(model)
        self.optimizer.step()
        self.drop_gradients()


@dataclass(frozen=True)
class Generation(BenchmarkedModel):
    """Greedy generation after a short prompt; ``tokens`` are the prompt and a given continuation.

    Attributes:
        static_cache: the cache has its full size from the start.
    """

    static_cache: bool = False

    @property
    def parts(self) -> int:
        """The number of tokens that each sequence gets."""
        return self.tokens.shape[1] - _PROMPT_TOKENS

    def step(self, model: Any = None) -> None:
        """Generate as it is timed."""
        prompt = self.tokens[:, :_PROMPT_TOKENS]
        with torch.no_grad():
            found = (self.model if model is None else model).generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.parts,
                do_sample=False,
                cache_implementation="static" if self.static_cache else None,
            )
        assert found.shape == self.tokens.shape

    def outputs_and_gradients(self, model: Any = None) -> list[Tensor]:
        """The logits of given tokens, one by one: generated ones may differ after a single rounding."""
        found, cache = [], None
        with torch.no_grad():
            for part in self.tokens.split([_PROMPT_TOKENS, *[1] * self.parts], dim=1):
                output = (self.model if model is None else model)(input_ids=part, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                found.append(output.logits.flatten())
        return [torch.cat(found).float().cpu()]


@dataclass(frozen=True)
class ShardedModel(BenchmarkedModel):
    """A training step of a model whose layers are sharded by FSDP2 over the processes of the default group.

    Attributes:
        case: to build it again: what is sharded shares no weights with another model.
    """

    case: ModelCase | None = None

    shares_weights = False

    def twin(self) -> ShardedModel:
        """Copy the step, with a model that has equal weights of its own, which ``place`` shards."""
        assert self.case is not None
        model = build(self.case, self.gradient.dtype, self.tokens.device)
        model.load_state_dict(self.model.state_dict())
        return replace(self, model=model)

    def place(self) -> None:
        """Shard the layers, and then the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.tokens.device.type, (torch.distributed.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def build(case: ModelCase, dtype: torch.dtype, device: torch.device, auto_class: Any = None) -> Any:
    """The model of a case with random weights, drawn on ``device``; ``auto_class`` is ``AutoModel`` by default."""
    from transformers import AutoModel

    on_device = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_device), device:
        torch.manual_seed(0)
        chosen, config = auto_class or AutoModel, case.config()
        try:
            model = chosen.from_config(config, dtype=dtype, attn_implementation="sdpa")
        except ValueError:  # T5 has attention of its own alone, and Mamba has none.
            model = chosen.from_config(config, dtype=dtype, attn_implementation="eager")
    return model.train()


def randomize_norm_weights(model: nn.Module, generator: torch.Generator) -> dict[str, NormSpec]:
    """Add noise to the weight of every norm, because an error in gamma does not show where gamma is one.

    Returns:
        The paths of all norms, those with a gate aside, with what they compute.
    """
    report = apply_fused_norm(model, rope=False, residual=False)
    norms = {site.path: site.spec for site in report.fused if site.kind in ("norm", "qk") and site.spec is not None}
    remove_fused_norm(model)
    with torch.no_grad():
        for path in norms:
            weight: Any = model.get_submodule(path).weight
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, device=weight.device))
    return {path: spec for path, spec in norms.items() if not isinstance(spec, GatedNormSpec)}


def prepare(case: ModelCase, dtype: torch.dtype, device: torch.device) -> BenchmarkedModel:
    """Build the model of a case, with random norm weights, and the inputs of its step.

    Args:
        case: of a step that is taken in this process, or in each of several.
        dtype: of the weights; of autocast for the step of that name, where weights are fp32.
        device: of all of it.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    with_head = case.step == "train" or case.generates
    weights = torch.float32 if case.step == "autocast" else dtype
    model = build(case, weights, device, AutoModelForCausalLM if with_head else AutoModel)
    generator = torch.Generator(device).manual_seed(1)
    config = model.config.get_text_config(decoder=True)
    length = case.length + (_PROMPT_TOKENS if case.generates else 0)
    tokens = torch.randint(1, config.vocab_size, (case.batch, length), generator=generator, device=device)
    gradient = torch.randn(
        (case.batch, 1 if with_head else length, config.hidden_size), generator=generator, device=device
    ).to(dtype)
    norms = randomize_norm_weights(model, generator)
    step = BenchmarkedModel(model, tokens, gradient, norms, [f"{path}.weight" for path in norms])
    if model.config.is_encoder_decoder:
        step = replace(step, inputs={"decoder_input_ids": tokens})
    return _KINDS.get(case.step, lambda step, case: step)(step, case)


def relative_error(results: Sequence[Tensor], stock: Sequence[Tensor]) -> float:
    """The largest relative error, by the norm of each of several vectors; NaN where a result is NaN."""
    errors = [(result - true).norm() / true.norm() for result, true in zip(results, stock, strict=True)]
    return float(torch.stack(errors).max())


def release_memory(device: torch.device) -> None:
    """Give the memory of deleted models back to the device; on a CPU nobody measures it."""
    if device.type != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def _whole(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    fused = step.tokens.device.type == "cuda"
    optimizer = torch.optim.AdamW(step.model.parameters(), lr=0.0, fused=fused)
    for weight in step.model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # Its state is there before memory is measured, as weights are.
    optimizer.zero_grad()
    return WholeTrainingStep(step.model, step.tokens, step.gradient, step.norms, step.watched, optimizer=optimizer)


def _checkpointed(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    step.model.gradient_checkpointing_enable({"use_reentrant": False})
    return step


def _with_adapters(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[step.tokens.device] if step.tokens.device.type == "cuda" else []):
        torch.manual_seed(0)
        config = LoraConfig(r=_LORA_RANK, lora_alpha=_LORA_RANK, target_modules="all-linear", init_lora_weights=False)
        adapted = get_peft_model(step.model, config)
    watched = [path for path, parameter in adapted.named_parameters() if parameter.requires_grad]
    prefix = next(path for path, module in adapted.named_modules() if module is adapted.get_base_model())
    norms = {f"{prefix}.{path}": spec for path, spec in step.norms.items()}
    return replace(step, model=adapted, norms=norms, watched=watched)


def _packed(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    starts = [case.length * (index * index) // _PACKED_SEQUENCES**2 for index in range(_PACKED_SEQUENCES + 1)]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(case.batch, -1)
    return replace(step, inputs={"position_ids": positions.to(step.tokens.device)})


def _with_image(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    """Let the first half of the tokens be those of a square image, or as many as a square has."""
    config = step.model.config
    vision, device = config.vision_config, step.tokens.device
    merged = math.isqrt(case.length // 2)
    side = merged * vision.spatial_merge_size
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    image = torch.randn((case.batch * side**2, values), generator=torch.Generator(device).manual_seed(2), device=device)
    tokens = step.tokens.clone()
    tokens[:, : merged**2] = config.image_token_id
    inputs = {
        "pixel_values": image.to(step.gradient.dtype),
        "image_grid_thw": torch.tensor([[1, side, side]] * case.batch, device=device),
        "mm_token_type_ids": (tokens == config.image_token_id).int(),
    }
    return replace(step, tokens=tokens, inputs=inputs)


def _generation(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    model = step.model.eval()
    model.generation_config.eos_token_id = None  # Every generation has the same length.
    model.generation_config.pad_token_id = 0
    model.generation_config.disable_compile = True  # With a static cache transformers would compile every variant.
    static = case.step == "generate static"
    return Generation(model, step.tokens, step.gradient, step.norms, static_cache=static)


def _sharded(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    return ShardedModel(step.model, step.tokens, step.gradient, step.norms, step.watched, case=case)


_KINDS = {
    "image": _with_image,
    "train": _whole,
    "autocast": lambda step, case: replace(step, autocast=step.gradient.dtype),
    "checkpointing": _checkpointed,
    "lora": _with_adapters,
    "packed": _packed,
    "generate": _generation,
    "generate static": _generation,
    "fsdp2": _sharded,
}
