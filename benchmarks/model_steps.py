"""The steps of whole models that are timed: training steps of several kinds, and generation, with random weights."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fused_norm.check.distances import distance
from fused_norm.kernels.vocabulary_head import IGNORED
from fused_norm.model_configs.layers import quantise
from fused_norm.patcher import apply_fused_norm, remove_fused_norm
from fused_norm.spec import GatedNormSpec, NormSpec

from .model_cases import ModelCase

ALLOWED_ERROR = 0.2
"""Relative error to stock that a variant may have in its outputs and in the gradients of weights. In bf16 over dozens
of layers two correct implementations differ by 0.02 to 0.06, and one that is wrong by about one."""

_PROMPT_TOKENS = 16
_PACKED_SEQUENCES = 8  # In one row, of unequal lengths.
_LORA_RANK, _LORA_DROPOUT = 16, 0.05

Step = TypeVar("Step", bound="BenchmarkedModel")


def body_of(model: Any) -> Any:
    """The module that has the decoder's layers, within a head and within adapters."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(model, model.base_model_prefix, model)


@dataclass(frozen=True)
class BenchmarkedModel:
    """A model and the inputs of its training step.

    Attributes:
        model: in training mode, with a head if the inputs have labels.
        tokens: [batch, length].
        gradient: of the last hidden state, [batch, length, hidden size]: if there is no loss, the backward starts
            from it.
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
    inputs: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None

    shares_weights = True
    """A twin uses the parameters of the model it was made from; sharded ones have their own."""

    @property
    def parts(self) -> int:
        """The number that a step's time is divided by for the tables: 1, or a generation's tokens in each sequence."""
        return 1

    @property
    def has_loss(self) -> bool:
        """Return whether the step ends in the vocabulary and its loss."""
        return "labels" in self.inputs

    def twin(self: Step) -> Step:
        """Copy the step, with a model that a variant may change and that shares the weights of this one."""
        shared = (*self.model.parameters(), *self.model.buffers())
        return replace(self, model=copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared}))

    def place(self) -> None:
        """Make the changed model ready if it takes more than its weights: see ``ShardedModel``."""

    def forward_backward(self, model: Any = None) -> Tensor:
        """Run forward and backward, and return the loss, or without a head the last hidden state.

        ``model``: what to call instead of the model itself, such as its compiled form.
        """
        model, ends_in = self.model if model is None else model, "loss" if self.has_loss else "last_hidden_state"
        kind = self.tokens.device.type
        with torch.autocast(kind, self.autocast) if self.autocast else contextlib.nullcontext():
            output: Tensor = getattr(model(input_ids=self.tokens, use_cache=False, **self.inputs), ends_in)
        # A copy, because Liger's norms write into the gradient that they are given.
        output.backward(None if self.has_loss else self.gradient.to(output.dtype, copy=True))
        return output

    @cached_property
    def trained(self) -> list[Tensor]:
        """The parameters that are trained, which an optimizer lists once: to search a model for them takes the host
        milliseconds."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def drop_gradients(self) -> None:
        """Set the gradients of all trained parameters to None."""
        for parameter in self.trained:
            parameter.grad = None

    def step(self, model: Any = None) -> None:
        """Run one step as it is timed."""
        self.forward_backward(model)
        self.drop_gradients()

    def outputs_and_gradients(self, model: Any = None, seed: int = 0) -> list[Tensor]:
        """The output and the gradients of what is watched, a vector each, to be compared; ``seed`` is of dropout."""
        torch.manual_seed(seed)
        output = self.forward_backward(model).detach().flatten()
        weights = [self.model.get_parameter(path) for path in self.watched]
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        whole = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
        self.drop_gradients()
        return [output.float().cpu(), torch.cat([gradient.flatten().float() for gradient in whole]).cpu()]


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
            generated = (self.model if model is None else model).generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.parts,
                do_sample=False,
                cache_implementation="static" if self.static_cache else None,
            )
        assert generated.shape == self.tokens.shape

    def outputs_and_gradients(self, model: Any = None, seed: int = 0) -> list[Tensor]:
        """The logits of given tokens, one by one: generated ones may differ after a single rounding."""
        logits, cache = [], None
        takes = inspect.signature(type(self.model).forward).parameters
        name = "cache" if "cache" in takes else "past_key_values"  # before transformers 5.24
        with torch.no_grad():
            for part in self.tokens.split([_PROMPT_TOKENS, *[1] * self.parts], dim=1):
                output = (self.model if model is None else model)(input_ids=part, use_cache=True, **{name: cache})
                cache = output.past_key_values
                logits.append(output.logits.flatten())
        return [torch.cat(logits).float().cpu()]


class ShardedModel(BenchmarkedModel):
    """A training step of a model whose layers are sharded by FSDP2 over the processes of the default group.

    Weights are in fp32, and gathered in the dtype of ``gradient``.
    """

    shares_weights = False

    def twin(self) -> ShardedModel:
        """Copy the step, with a model that has equal weights of its own, which ``place`` shards."""
        return replace(self, model=copy.deepcopy(self.model))

    def place(self) -> None:
        """Shard the layers, and then the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.tokens.device.type, (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self.gradient.dtype, reduce_dtype=torch.float32)
        for module in (*body_of(self.model).layers, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)


def why_not_here(case: ModelCase) -> str | None:
    """The reason why a step cannot be taken by this process with what is installed, or None."""
    if "fsdp2" in case.step and not torch.distributed.is_initialized():
        return "torchrun --nproc-per-node 2 -m benchmarks models measures it"
    for word, package in (("lora", "peft"), ("qlora", "peft"), ("qlora", "bitsandbytes")):
        if word in case.step and importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


def randomize_norm_weights(model: nn.Module, generator: torch.Generator) -> dict[str, NormSpec]:
    """Add noise to the weight of every norm, because an error in gamma does not show if gamma is one.

    Returns:
        The paths of all norms that have a weight and no gate, with what they compute.
    """
    report = apply_fused_norm(model, rope=False, residual=False)
    norms = {site.path: site.spec for site in report.fused if site.kind in ("norm", "qk") and site.spec is not None}
    remove_fused_norm(model)
    norms = {path: spec for path, spec in norms.items() if hasattr(model.get_submodule(path), "weight")}
    with torch.no_grad():
        for path in norms:
            weight: Any = model.get_submodule(path).weight
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator, device=weight.device))
    return {path: spec for path, spec in norms.items() if not isinstance(spec, GatedNormSpec)}


def prepare(case: ModelCase, dtype: torch.dtype, device: torch.device, *, in_fp32: bool = True) -> BenchmarkedModel:
    """Build the model of a case, with random norm weights, and the inputs of its step.

    ``dtype``: of the weights; of autocast or of gathered weights if the weights are fp32. ``in_fp32``: as for
    ``quantise``, of QLoRA.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    words = {*case.step}
    auto_class = AutoModelForCausalLM if words & {"loss", "masked"} or case.generates else AutoModel
    from_config = partial(auto_class.from_config, dtype=torch.float32 if words & {"autocast", "fsdp2"} else dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        try:
            model = from_config(case.config(), attn_implementation="sdpa").train()
        except ValueError:  # T5 has attention of its own alone, and Mamba has none.
            model = from_config(case.config(), attn_implementation="eager").train()
    generator = torch.Generator(device).manual_seed(1)
    config = model.config.get_text_config(decoder=True)
    length = case.length + (_PROMPT_TOKENS if case.generates else 0)
    tokens = torch.randint(1, config.vocab_size, (case.batch, length), generator=generator, device=device)
    gradient = torch.randn((case.batch, length, config.hidden_size), generator=generator, device=device).to(dtype)
    norms = randomize_norm_weights(model, generator)
    casts = dtype != torch.float32 and words & {"autocast", "lora", "qlora"}
    step = BenchmarkedModel(
        model, tokens, gradient, norms, [f"{path}.weight" for path in norms], autocast=dtype if casts else None
    )
    if model.config.is_encoder_decoder:
        step = replace(step, inputs={"decoder_input_ids": tokens})
    if "image" in words:
        step = _with_image(step, case)
    if "packed" in words:
        step = _packed(step, case)
    if "checkpointing" in words:
        step.model.gradient_checkpointing_enable({"use_reentrant": False})
    if words & {"lora", "qlora"}:
        step = _with_adapters(step, case, in_fp32)
    if words & {"loss", "masked"}:
        labels = _labels_without_prompts(step, case) if "masked" in words else step.tokens
        step = replace(step, inputs={**step.inputs, "labels": labels})
    if case.generates:
        model = step.model.eval()
        model.generation_config.eos_token_id = None  # Every generation has the same length.
        model.generation_config.pad_token_id = 0
        model.generation_config.disable_compile = True  # With a static cache transformers would compile every variant.
        step = Generation(model, step.tokens, step.gradient, step.norms, static_cache="static" in words)
    return ShardedModel(**vars(step)) if "fsdp2" in words else step


def relative_error(results: Sequence[Tensor], stock: Sequence[Tensor]) -> float:
    """The largest relative distance of several vectors, infinite if a result is not finite."""
    return max(distance(*pair) for pair in zip(results, stock, strict=True))


def release_memory(device: torch.device) -> None:
    """Give the memory of deleted models back to the device; on a CPU nobody measures it."""
    if device.type != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def _with_adapters(step: BenchmarkedModel, case: ModelCase, in_fp32: bool) -> BenchmarkedModel:
    """Put LoRA on all linears, or on those of queries and values; for QLoRA all are packed into nf4 before."""
    from peft import LoraConfig, get_peft_model

    if "qlora" in case.step:
        quantise(step.model, step.gradient.dtype, in_fp32=in_fp32)
        release_memory(step.tokens.device)  # of the linears before, which hold each other
    with torch.random.fork_rng(devices=[step.tokens.device] if step.tokens.device.type == "cuda" else []):
        torch.manual_seed(0)
        config = LoraConfig(
            r=_LORA_RANK,
            lora_alpha=_LORA_RANK,
            lora_dropout=_LORA_DROPOUT if "dropout" in case.step else 0.0,
            target_modules=["q_proj", "v_proj"] if "qv" in case.step else "all-linear",
            init_lora_weights=False,
        )
        adapted = get_peft_model(step.model, config)
    watched = [path for path, parameter in adapted.named_parameters() if parameter.requires_grad]
    prefix = next(path for path, module in adapted.named_modules() if module is adapted.get_base_model())
    norms = {f"{prefix}.{path}": spec for path, spec in step.norms.items()}
    return replace(step, model=adapted, norms=norms, watched=watched)


def _packed(step: BenchmarkedModel, case: ModelCase) -> BenchmarkedModel:
    starts = [case.length * (index * index) // _PACKED_SEQUENCES**2 for index in range(_PACKED_SEQUENCES + 1)]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    device = step.tokens.device
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(case.batch, -1).to(device)
    ends = torch.tensor([0, *lengths * case.batch], device=device).cumsum(0, dtype=torch.int32)
    bounds = {f"cu_seq_lens_{of}": ends for of in "qk"} | {f"max_length_{of}": max(lengths) for of in "qk"}
    if device.type == "cuda":  # Elsewhere PyTorch has no such attention: sdpa gets a mask.
        attend_within_sequences(step.model)
    return replace(step, inputs={"position_ids": positions, **bounds})


def attend_within_sequences(model: Any) -> None:
    """Let a model attend by PyTorch's flash attention for sequences of many lengths, without a mask."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface

    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    AttentionInterface.register("varlen", partial(_attention, partial(varlen_attn, **grouped)))
    model.set_attn_implementation("varlen")


def _attention(
    varlen_attn: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Causal attention within sequences, for transformers to call with q, k and v [batch, heads, length, width].

    ``varlen_attn`` takes and returns [tokens, heads, width]; ``named`` says where sequences begin in all of them.
    """
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1).to(value.dtype) for tensor in (query, key, value))
    ends, longest, window = named["cu_seq_lens_q"], named["max_length_q"], named.get("sliding_window")
    window = (-1 if window is None else window - 1, 0)
    y = varlen_attn(q, k, v, ends, ends, longest, longest, scale=named["scaling"], window_size=window)
    return y.unflatten(0, (len(query), -1)), None


def _labels_without_prompts(step: BenchmarkedModel, case: ModelCase) -> Tensor:
    """Labels but for the first half of every sequence, as in instruction tuning, in which a prompt has none."""
    lengths = torch.tensor([case.length] * case.batch)
    if "packed" in case.step:
        lengths = step.inputs["cu_seq_lens_q"].diff().cpu()
    is_prompt = torch.cat([torch.arange(length) < length // 2 for length in lengths.tolist()])
    return step.tokens.masked_fill(is_prompt.view(step.tokens.shape).to(step.tokens.device), IGNORED)


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
