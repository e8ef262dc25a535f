"""What people do with a model, each as a script that runs on a model with replayed layers and on its eager twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

import fused_norm

from .graph_stand_in import StandIn

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
ONE, TWO = ((1, 512), (2, 300)) if HAS_GPU else ((1, 7), (2, 5))
"""Two shapes of tokens."""

_SMALL = (
    {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    if HAS_GPU
    else {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
)
LAYERS = 4 if HAS_GPU else 3
VOCABULARY = 2048 if HAS_GPU else 32

ATTENTION = "eager" if HAS_GPU else "sdpa"
"""The attention of models whose bits are compared: on a GPU flash attention's backward is not deterministic."""

Case = Callable[["Run"], None]
CASES: dict[str, Case] = {}


def case(script: Case) -> Case:
    """Add a script to the cases."""
    CASES[script.__name__] = script
    return script


def base_model(attention: str = "sdpa", layers: int = LAYERS) -> Any:
    """Return a Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_hidden_layers=layers, use_cache=False, tie_word_embeddings=True, **_SMALL
    )
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation=attention).train()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def with_adapters(model: Any, dropout: float = 0.05) -> Any:
    """Return the model with LoRA in all its linears; its ``lora_B`` are random."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=dropout)
    model = peft.get_peft_model(model, config).base_model.model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return model


def patched(model: Any, **options: Any) -> Any:
    """Return the model with all fused on a GPU; on a CPU one norm alone, as kernels are interpreted."""
    few = {} if HAS_GPU else {"modules": "model.norm"}
    return fused_norm.apply_fused_norm(model, **{**few, **options})


class Run:
    """One model, driven by a script, and what came out.

    Attributes:
        mode: ``full`` or ``lora``.
        results: the losses, gradients and other tensors that the script noted.
        report: of ``apply_fused_norm``.
    """

    def __init__(
        self, mode: str, *, graphs: bool, attention: str = ATTENTION, layers: int = LAYERS, **options: Any
    ) -> None:
        self.mode = mode
        self.model = base_model(attention, layers)
        if mode == "lora":
            self.model = with_adapters(self.model)
        self.report = patched(self.model, cuda_graphs=graphs, **options)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.layers = self.model.model.layers
        self.results: list[Tensor | None] = []

    @property
    def replays(self) -> Any:
        """The counts of replays."""
        return self.report.replays

    def ids(self, shape: tuple[int, int], seed: int = 0) -> Tensor:
        """Return tokens."""
        return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

    def loss(self, shape: tuple[int, int], seed: int = 0, *, padded: bool = False, **arguments: Any) -> Tensor:
        """Return the loss of tokens; random numbers follow from the seed."""
        torch.manual_seed(seed)
        ids = self.ids(shape, seed)
        if padded:
            arguments["attention_mask"] = torch.ones_like(ids)
            arguments["attention_mask"][0, : 1 + seed % 4] = 0
        with self.autocast():
            loss: Tensor = self.model(input_ids=ids, labels=ids, **arguments).loss
        return loss

    def autocast(self) -> torch.autocast:
        """The autocast that adapters are trained under."""
        return torch.autocast(DEVICE, torch.bfloat16, enabled=self.mode == "lora" and HAS_GPU)

    def note(self, *tensors: Tensor | None) -> None:
        """Keep the values of tensors."""
        self.results += [None if tensor is None else tensor.detach().clone() for tensor in tensors]

    def gradients(self) -> None:
        """Note the gradients of all trained parameters, and clear them."""
        self.note(*[parameter.grad for parameter in self.trained])
        for parameter in self.trained:
            parameter.grad = None

    def step(self, shape: tuple[int, int] = ONE, seed: int = 0, **arguments: Any) -> None:
        """Note loss and gradients of one step."""
        loss = self.loss(shape, seed, **arguments)
        loss.backward()
        self.note(loss)
        self.gradients()

    def warm_up(self, number: int = 3, shape: tuple[int, int] = ONE) -> None:
        """Take steps."""
        for seed in range(number):
            self.step(shape, seed)

    def adapters(self) -> list[Any]:
        """Return the LoRA layers."""
        return [module for module in self.model.modules() if hasattr(module, "scaling") and hasattr(module, "lora_A")]


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Make a stream the current one, and let it wait for the default one."""
    if HAS_GPU:
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            yield
        return
    StandIn.current = stream
    try:
        yield
    finally:
        StandIn.current = 0


@case
def equal_bits(run: Run) -> None:
    for seed in range(4):
        run.step(ONE, seed)
    for seed in range(4):
        run.step(TWO, seed)
    run.step(ONE, 9)


@case
def padding_masks(run: Run) -> None:
    for seed in range(5):
        run.step(TWO, seed, padded=seed % 2 == 0 or seed > 2)


@case
def positions_in_flight(run: Run) -> None:
    """Evaluate with other positions while a forward waits for its backward: cosines are an argument of all layers."""
    for shape in (ONE, TWO):  # of the second one, the evaluation is captured while nothing waits
        near = torch.arange(shape[1])[None].expand(shape).to(DEVICE)
        for seed in range(3):
            run.step(shape, seed, position_ids=near)
            with torch.no_grad():
                run.note(run.loss(shape, seed, position_ids=near * 3))
        for seed in range(5):
            loss = run.loss(shape, seed, position_ids=near)
            with torch.no_grad():
                run.note(run.loss(shape, seed, position_ids=near * 3))
            loss.backward()
            run.gradients()


@case
def packed_rows(run: Run) -> None:
    shape = (1, ONE[1])
    for seed in range(4):
        cut = 2 + seed % 2
        positions = torch.cat([torch.arange(cut), torch.arange(shape[1] - cut)])[None].to(DEVICE)
        run.step(shape, seed, position_ids=positions)


@case
def shapes_and_optimizer(run: Run) -> None:
    optimizer = torch.optim.AdamW(run.trained, 1e-3)
    for seed in range(9):
        loss = run.loss((ONE, TWO, (1, ONE[1] - 2))[seed * seed % 3], seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.note(loss)
    run.note(*run.trained)


@case
def many_lengths(run: Run) -> None:
    for seed in range(18):
        run.step((1, 3 + seed % 9), seed)


@case
def accumulation(run: Run) -> None:
    run.warm_up(2)
    for _ in range(2):
        for seed in range(3):
            loss = run.loss(ONE, 20 + seed) / 3
            loss.backward()
            run.note(loss)
        run.gradients()
    optimizer = torch.optim.SGD(run.trained, 0.1)
    for seed in range(3):
        run.loss(ONE, seed).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    run.note(*run.trained)


@case
def two_forwards_before_a_backward(run: Run) -> None:
    run.warm_up(2)
    for _ in range(5):
        first, second = run.loss(ONE, 5), run.loss(ONE, 6)
        (first - 2 * second).backward()
        run.note(first, second)
        run.gradients()
    run.step(ONE, 7)


@case
def two_shapes_in_flight(run: Run) -> None:
    run.warm_up(2, ONE)
    run.warm_up(2, TWO)
    for _ in range(4):
        first, second = run.loss(ONE, 5), run.loss(TWO, 6)
        first.backward()
        second.backward()
        run.note(first, second)
        run.gradients()
    for _ in range(2):
        first, second = run.loss(ONE, 5), run.loss(TWO, 6)
        second.backward()
        first.backward()
        run.gradients()


@case
def evaluation_between(run: Run) -> None:
    run.warm_up(2)
    for seed in range(4):
        loss = run.loss(ONE, seed)
        with torch.no_grad():
            other = run.loss(ONE, 30 + seed)
        loss.backward()
        run.note(loss, other)
        run.gradients()
    run.model.eval()
    with torch.no_grad():
        for seed in range(3):
            run.note(run.loss(TWO, seed))
    run.model.train()
    run.step(ONE, 3)


@case
def streams_in_turns(run: Run) -> None:
    """Evaluate on two streams, which begin together and do not wait for each other; then train on them in turns, and
    with a forward on each before the backwards."""
    streams = [torch.cuda.Stream() for _ in range(2)] if HAS_GPU else [1, 2]
    ids = [run.ids(ONE, seed) for seed in range(12)]  # To copy them to a GPU would wait for the stream.
    for first in range(0, len(ids), 2):
        torch.manual_seed(first)
        if HAS_GPU:
            torch.cuda._sleep(100_000_000)
        for stream, row in zip(streams, ids[first : first + 2], strict=True):
            with on_stream(stream), torch.no_grad(), run.autocast():
                run.note(run.model.model(input_ids=row).last_hidden_state)
    for seed in range(4):
        for stream in streams:
            if HAS_GPU:
                torch.cuda.synchronize()
            with on_stream(stream):
                run.step(TWO, seed)
    for _ in range(3):
        losses = []
        for seed, stream in enumerate(streams):
            with on_stream(stream):
                losses.append(run.loss(TWO, seed))
        for loss, stream in zip(reversed(losses), reversed(streams), strict=True):
            with on_stream(stream):
                loss.backward()
                run.note(loss)
            if HAS_GPU:
                torch.cuda.synchronize()
        run.gradients()


@case
def generation_between(run: Run) -> None:
    run.warm_up(2)
    for seed in range(2):
        run.model.eval()
        with torch.no_grad():
            prompt = run.ids((1, 4), seed)
            run.note(run.model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0))
        run.model.train()
        run.step(ONE, seed)


@case
def exceptions_between(run: Run) -> None:
    run.warm_up(2)

    def stop(module: nn.Module, args: Any) -> None:
        raise KeyError("stop")

    held = None
    for number in range(3):
        hook = run.layers[-1].register_forward_pre_hook(stop)
        try:
            run.loss(ONE, 3)
        except KeyError as error:
            held = error if number == 1 else None
        hook.remove()
        run.step(ONE, 4 + number)  # with the graph of the second one held
        if held is not None:
            held.__traceback__ = None
    run.step(ONE, 8)


@case
def adapters_scaled_and_switched(run: Run) -> None:
    run.warm_up(3)
    for layer in run.adapters():
        layer.scaling["default"] *= 0.5
    run.warm_up(3)
    for layer in run.adapters():
        layer.enable_adapters(False)
    with torch.no_grad():
        for seed in range(3):
            run.note(run.loss(ONE, seed))
    for layer in run.adapters():
        layer.enable_adapters(True)
        layer.scaling["default"] *= 2
    run.warm_up(2)
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    run.warm_up(3)


@case
def adapters_activated_in_turns(run: Run) -> None:
    """As a preference loss does whose reference is an adapter: each activation makes lists of names anew."""
    for layer in run.adapters():
        layer.update_layer("reference", 4, 8, config=run.model.peft_config["default"])
    for seed in range(5):
        for layer in run.adapters():
            layer.set_adapter("reference")
        with torch.no_grad():
            run.note(run.loss(ONE, seed))
        for layer in run.adapters():
            layer.set_adapter("default")
        run.step(ONE, seed)
    for layer in run.adapters():
        layer.set_adapter(["default", "reference"])
    run.warm_up(3)


@case
def fusing_disabled_between(run: Run) -> None:
    run.warm_up(2)
    with fused_norm.disabled():
        run.warm_up(3)
    run.step(ONE, 2)


@case
def forwards_dropped(run: Run) -> None:
    run.warm_up(2)
    for seed in range(3):
        run.loss(ONE, seed)
        run.step(ONE, 5 + seed)
    held = run.loss(ONE, 1)
    run.step(ONE, 2)
    del held
    run.step(ONE, 3)


@case
def graph_retained(run: Run) -> None:
    run.warm_up(2)
    for _ in range(2):
        loss = run.loss(ONE, 3)
        loss.backward(retain_graph=True)
        run.step(ONE, 4)
        loss.backward()
        run.gradients()
    run.step(ONE, 5)


@case
def gradients_kept(run: Run) -> None:
    run.warm_up(2)
    kept = [torch.autograd.grad(run.loss(ONE, seed), run.trained, allow_unused=True) for seed in range(3)]
    for gradients in kept:
        run.note(*gradients)


@case
def hidden_states_kept(run: Run) -> None:
    run.warm_up(2)
    kept: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda module, args, out: kept.append(out)) for layer in run.layers]
    for seed in range(3):
        run.step(ONE, seed)
    run.note(*kept)
    kept.clear()
    for hook in hooks:
        hook.remove()
    run.step(ONE, 5)


@case
def hidden_states_returned(run: Run) -> None:
    run.warm_up(2)
    for seed in range(3):
        torch.manual_seed(seed)
        ids = run.ids(ONE, seed)
        with run.autocast():
            states = run.model(input_ids=ids, labels=ids, output_hidden_states=True).hidden_states
        sum(state.float().square().mean() for state in states).backward()
        run.note(*states)
        run.gradients()


@case
def gradients_hooked(run: Run) -> None:
    run.warm_up(2)
    kept: dict[str, list[Tensor]] = {}
    outputs: list[Tensor] = []

    def watch(name: str, output: Tensor) -> None:
        output.retain_grad()
        output.register_hook(lambda grad: kept.setdefault(name, []).append(grad))
        outputs.append(output)

    hooks = [
        layer.register_forward_hook(lambda module, args, out, name=f"layer{i}": watch(name, out))
        for i, layer in enumerate(run.layers)
    ]
    for name, parameter in run.model.named_parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_hook(lambda grad, name=name: kept.setdefault(name, []).append(grad)))
    run.step(ONE, 3)
    run.step(ONE, 4)
    run.note(*[grad for name in sorted(kept) for grad in kept[name]], *outputs, *[out.grad for out in outputs])
    kept.clear()
    outputs.clear()
    for hook in hooks:
        hook.remove()
    run.step(ONE, 5)


@case
def backward_from_within(run: Run) -> None:
    run.warm_up(2)
    got: list[Tensor] = []
    hook = run.layers[1].register_forward_hook(lambda module, args, out: got.append(out))
    for _ in range(3):
        loss = run.loss(ONE, 3)
        got.pop().float().square().mean().backward(retain_graph=True)
        loss.backward()
        run.note(loss, torch.rand(3, device=DEVICE))
        run.gradients()
    hook.remove()
    run.step(ONE, 4)


@case
def changed_between_layers(run: Run) -> None:
    run.warm_up(2)
    hook = run.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
    run.warm_up(3)
    hook.remove()
    hook = run.layers[0].register_forward_hook(lambda module, args, out: out.mul_(1.25))
    run.warm_up(3)
    hook.remove()
    run.warm_up(2)


@case
def parameters_moved(run: Run) -> None:
    run.warm_up(2)
    old = []
    for name, parameter in run.model.named_parameters():
        if "layers" in name:
            old.append(parameter.data)
            parameter.data = parameter.data.clone() * 1.25
    run.warm_up(3)


@case
def layer_frozen(run: Run) -> None:
    run.warm_up(2)
    for parameter in run.layers[1].parameters():
        parameter.requires_grad_(False)
    run.warm_up(3)


@case
def first_layers_frozen(run: Run) -> None:
    for parameter in (*run.layers[0].parameters(), *run.model.model.embed_tokens.parameters()):
        parameter.requires_grad_(False)
    run.model.model.embed_tokens._forward_hooks.clear()
    run.warm_up(2)
    for _ in range(4):
        first, second = run.loss(ONE, 5), run.loss(ONE, 6)
        second.backward()
        first.backward()
        run.note(first, second)
        run.gradients()


@case
def hooks_and_forwards_inside(run: Run) -> None:
    run.warm_up(2)
    hook = run.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    run.warm_up(2)
    hook.remove()
    mlp = run.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 2
    run.warm_up(2)
    del mlp.forward
    run.warm_up(2)


@case
def attributes_written(run: Run) -> None:
    run.warm_up(2)
    for layer in run.layers:
        layer.self_attn.scaling *= 0.5
    run.warm_up(3)
    for layer in run.layers:
        layer.self_attn.scaling *= 2
    run.warm_up(2)


@case
def classes_patched(run: Run) -> None:
    run.warm_up(2)
    attention = next(cls for cls in type(run.layers[0].self_attn).__mro__ if "forward" in vars(cls))
    forward = attention.forward
    attention.forward = lambda self, *args, **kwargs: tuple(
        part if part is None else part * 1.5 for part in forward(self, *args, **kwargs)
    )
    try:
        run.warm_up(2)
    finally:
        attention.forward = forward
    run.warm_up(2)


@case
def checkpointing_switched(run: Run) -> None:
    run.warm_up(2)
    run.model.gradient_checkpointing_enable()
    run.warm_up(2)
    run.model.gradient_checkpointing_disable()
    run.warm_up(2)


@case
def count_of_items(run: Run) -> None:
    for seed in range(4):
        run.step(ONE, seed, num_items_in_batch=100 + seed)


@case
def frozen_weights_written(run: Run) -> None:
    run.warm_up(2)
    with torch.no_grad():
        for layer in run.layers:
            for parameter in layer.parameters():
                parameter.mul_(1.25)
    run.warm_up(2)


@case
def embeddings_given(run: Run) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        embedded = torch.randn(*ONE, _SMALL["hidden_size"], device=DEVICE, dtype=DTYPE, requires_grad=True)
        with run.autocast():
            loss = run.model(inputs_embeds=embedded, labels=run.ids(ONE, seed)).loss
        loss.backward()
        run.note(loss, embedded.grad)
        run.gradients()


@case
def clipped(run: Run) -> None:
    optimizer = torch.optim.AdamW(run.trained, 1e-3)
    for seed in range(4):
        for micro in range(2):
            (run.loss(ONE, 10 * seed + micro) / 2).backward()
        run.note(torch.nn.utils.clip_grad_norm_(run.trained, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    run.note(*run.trained)
