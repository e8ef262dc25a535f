"""A callback that patches the model of a transformers ``Trainer``."""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..options import FuseOptions
from ..patcher import PatchReport, apply_fused_norm
from ..patcher.class_swap import Fused
from ..patcher.loss_survey import with_heads_of_trl
from ..patcher.survey import compiled_modules
from ..spec import FusedNormError

logger = logging.getLogger("fused_norm")


class FusedNormCallback(TrainerCallback):
    """Patches the model of the Trainer that it is given to: for code that owns a Trainer, but not its model.

    ``Trainer(model, args, callbacks=[FusedNormCallback(recompute=True)])`` is ``apply_fused_norm(model,
    recompute=True)`` at the end of the Trainer's ``__init__``: after PEFT, which trainers of TRL apply there, and
    before gradient checkpointing, the optimizer and ``accelerator.prepare``, which come with ``train()``. A model that
    the Trainer makes later, from ``model_init``, and that of a Trainer which gets the callback by ``add_callback`` are
    patched when training begins. ``recompute="mlp"`` and ``"attention"`` take the place of the Trainer's gradient
    checkpointing, which is switched off. In a model that is compiled, or that the Trainer or accelerate is going to
    compile, every level is left out, and checkpointing stays on; ``cuda_graphs`` is left out, too. Under
    ``cuda_graphs`` a cache of keys and values that transformers 4 would fill in training is switched off, by
    ``config.use_cache``, when training begins.

    Args:
        compile_layers: compile each decoder layer by itself after that, and leave the model around them eager. It goes
            with gradient checkpointing, but not with ``recompute``: compiled code keeps what its compiler decides; and
            not with ``cuda_graphs``.
        options: those of ``apply_fused_norm``.

    Attributes:
        compile_layers, options: as given.
        report: on the model patched last; None before. When training begins its rows on losses are brought up to date:
            a trainer of TRL has put its own head on the model by then.

    Raises:
        TypeError, ValueError: for options as in ``FuseOptions``; ValueError for ``recompute`` or ``cuda_graphs`` in
            compiled layers.
        FusedNormError: out of the Trainer, as ``apply_fused_norm``, or if layers are to be compiled and the model
            does not say which modules they are.
    """

    def __init__(self, *, compile_layers: bool = False, **options: Any) -> None:
        self.compile_layers = compile_layers
        self.options = FuseOptions(**options)
        if compile_layers and self.options.recompute:
            raise ValueError(
                f"recompute={self.options.recompute!r} does nothing in compiled layers, whose compiler decides what is"
                " kept; leave compile_layers out, or recompute, and use gradient checkpointing to keep less"
            )
        if compile_layers and self.options.cuda_graphs:
            raise ValueError(
                "cuda_graphs=True does nothing in compiled layers: torch.compile has graphs of its own,"
                " mode='reduce-overhead'; leave compile_layers out, or cuda_graphs"
            )
        self.report: PatchReport | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._patch(kwargs["model"], args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # By now the model may be sharded, and norms that FSDP has flattened are recognised no more.
        if not any(isinstance(module, Fused) for module in kwargs["model"].modules()):
            self._patch(kwargs["model"], args)
        elif self.report is not None:  # trainers of TRL have put their heads on the model since
            self.report = with_heads_of_trl(self.report, kwargs["model"])
        if self.report is not None and self.report.replays is not None:
            _switch_caches_off(kwargs["model"], args)

    def _patch(self, model: nn.Module, args: TrainingArguments) -> None:
        options = vars(self.options)
        dynamo = TorchDynamoPlugin().backend  # by the environment, as ``accelerate launch --dynamo_backend`` leaves it
        is_compiled = bool(args.torch_compile) or dynamo != DynamoBackend.NO or bool(compiled_modules(model))
        if self.options.recompute and is_compiled:
            logger.warning(
                "recompute=%r is left out: the model is compiled, and its compiler decides what is kept",
                self.options.recompute,
            )
            options = {**options, "recompute": False}
        elif isinstance(self.options.recompute, str) and args.gradient_checkpointing:
            logger.warning("recompute=%r takes the place of gradient checkpointing", self.options.recompute)
            for name in ("gradient_checkpointing", "activation_checkpointing"):  # the latter since transformers 5.24
                if hasattr(args, name):
                    setattr(args, name, False)
            # Trainers of TRL have switched it on by now.
            new: Any = getattr(model, "activation_checkpointing_disable", None)
            switch_off: Any = new or model.gradient_checkpointing_disable
            switch_off()
        if self.options.cuda_graphs and is_compiled:
            logger.warning("cuda_graphs is left out: the model is compiled, and its compiler decides what is launched")
            options = {**options, "cuda_graphs": False}
        elif self.options.cuda_graphs and args.gradient_checkpointing:
            logger.warning(
                "cuda_graphs does nothing under gradient checkpointing, where layers run eager in training;"
                " recompute='attention' takes the place of checkpointing"
            )
        self.report = apply_fused_norm(model, **options)
        if self.compile_layers:
            whole = getattr(model, "_no_split_modules", None) or ()
            layers = [module for module in model.modules() if type(module).__name__ in whole]
            if not layers:
                raise FusedNormError(f"{type(model).__name__} does not say what its layers are; compile them yourself")
            for layer in layers:
                layer.compile()


def _switch_caches_off(model: nn.Module, args: TrainingArguments) -> None:
    """Let a model return no cache of keys and values, unless the Trainer's arguments ask for it.

    transformers 5 does so for every training; layers that are given a cache are not replayed.
    """
    if getattr(args, "use_cache", False):
        return
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    if caching:
        logger.info("cuda_graphs: config.use_cache is False from now on, as layers with a cache are not replayed")
