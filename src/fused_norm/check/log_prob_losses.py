"""A step whose loss is of log-probabilities, computed of a model's logits as training loops of one's own write it.

A preference loss (DPO) and a policy gradient with clipping, an entropy bonus and a penalty for leaving a reference
(GRPO) are added up. The model is called without labels; stock and fused run the same code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.vocabulary_head import IGNORED

TEMPERATURE = 0.5
"""Of the policy; that of the reference is 1, so that its log-probabilities are others if both are one model."""

_BETA, _CLIP, _ENTROPY_BONUS, _PENALTY = 0.03, 0.2, 5.0, 0.5
"""Of an untrained model's gradients each term makes a sixth or more."""

_OFFSETS = -0.4, 0.05, 0.3
"""Logs of the ratios to the policy that generated a token: one is clipped if the advantage is positive, another if it
is not, and none is near the limit, which roundings would decide."""


def log_prob_outputs(model: Any, ids: Tensor, labels: Tensor, *, reference: Any = None) -> dict[str, Tensor]:
    """The loss of a step, and the log-probabilities and entropies that it is made of.

    A step's loss is a mean over its sequences, whatever micro-batches they are in.

    Args:
        model: the policy, a causal language model.
        ids: [batch, sequence] of token ids, on the model's device.
        labels: the same, ``IGNORED`` for prompts; a sequence may have no other.
        reference: a model that is not trained; the policy, at another temperature, when None.
    """
    reference = model if reference is None else reference
    preference, log_probs = _preference_loss(model, reference, ids, labels)
    of_policy, entropies = _policy_loss(model, reference, ids, labels)
    return {"log-probs": log_probs, "entropies": entropies, "loss": preference + of_policy}


def _preference_loss(policy: Any, reference: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of preferring each completion to its tokens in reverse order; the log-probs of both, [2 * batch, n]."""
    has_label = labels != IGNORED
    pairs = torch.cat([ids, torch.where(has_label, ids.flip(1), ids)])
    targets = pairs.masked_fill(~has_label.repeat(2, 1), IGNORED)
    log_probs, _ = token_log_probs(logits_of(policy, pairs, TEMPERATURE), targets)
    ratios = (log_probs - reference_log_probs(reference, pairs, targets)).sum(1)
    chosen, rejected = ratios.chunk(2)
    return -functional.logsigmoid(_BETA * (chosen - rejected)).mean(), log_probs.detach()


def _policy_loss(policy: Any, reference: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of completions whose rewards and generating policy go by their tokens; entropies, [batch, n]."""
    logits = logits_of(policy, ids, TEMPERATURE)
    log_probs, mask = token_log_probs(logits, labels)
    entropies = token_entropies(logits)
    advantages = (ids.sum(1, keepdim=True) % 4 - 1.5) / 1.5
    offsets = torch.tensor(_OFFSETS, device=ids.device)[ids[:, 1:] % len(_OFFSETS)]
    ratio = (log_probs - log_probs.detach() + offsets).exp()
    gains = torch.minimum(ratio * advantages, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantages)
    above = reference_log_probs(reference, ids, labels) - log_probs
    # Tokens differ in their bonus, so that a gradient of another one's entropy is another.
    losses = _PENALTY * above.square() - gains - _ENTROPY_BONUS * (ids[:, 1:] % 2) * entropies
    loss = ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    return loss, (entropies * mask).detach()


def logits_of(model: Any, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """The logits of the next tokens over a temperature, [batch, sequence - 1, vocabulary], in fp32."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[:, :-1].float() / temperature


def token_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the next labels, 0 if there is none, and the mask of those that there are."""
    targets = labels[:, 1:]
    mask = targets != IGNORED
    log_probs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return log_probs * mask, mask


def token_entropies(logits: Tensor) -> Tensor:
    """The entropy of each row's probabilities, in nats."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@torch.no_grad()
def reference_log_probs(reference: Any, ids: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the next labels under a model that is not trained; 0 if there is none."""
    return token_log_probs(logits_of(reference, ids, temperature), labels)[0]
