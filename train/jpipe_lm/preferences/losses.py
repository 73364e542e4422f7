"""The losses of preferences. Each is a sum over the pairs of a microbatch, so microbatches and padding do not change their mean.

Letters in shapes: b pairs; 2: the chosen and the rejected answer; s positions.
"""

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jpipe import InputError
from jpipe_train.config.config import Mode
from jpipe_train.losses.cross_entropy import nats_of_each, with_router_loss

Sum = tuple[Float[Array, ""], Float[Array, ""]]


class Pairs(NamedTuple):
    """The answers of some pairs as a model sees them."""

    log_probs: Float[Array, "b 2"]  # the log-probability of each answer
    means: Float[Array, "b 2"]  # the log-probability divided by the number of tokens
    reference: Float[Array, "b 2"]  # the log-probability by the reference; 0 if the labels have none
    counts: Bool[Array, " b"]  # whether a pair is a pair, and not padding


def pairs_of(outputs: Any, labels: Any) -> Pairs:
    """Compute the log-probabilities of answers.

    Args:
        outputs: logits (2·b, s, v) or an `Unprojected`; with experts the entry "tokens" of a dict.
        labels: a dict with "tokens" (b, 2, s), below zero outside of the answers, and possibly "reference" (b, 2).

    Raises:
        InputError: the labels are not pairs.
    """
    tokens = labels.get("tokens") if isinstance(labels, dict) else None
    if tokens is None or tokens.ndim != 3 or tokens.shape[1] != 2:
        raise InputError("loss.name: expected labels of pairs; use data.format preferences")
    outputs = outputs["tokens"] if isinstance(outputs, dict) else outputs
    each = -nats_of_each(outputs, tokens.reshape(-1, tokens.shape[-1])).reshape(tokens.shape)
    sizes, log_probs = (tokens >= 0).sum(-1), each.sum(-1)
    reference = labels["reference"].astype(each.dtype) if "reference" in labels else jnp.zeros_like(log_probs)
    return Pairs(log_probs, log_probs / jnp.maximum(sizes, 1).astype(each.dtype), reference, (sizes > 0).all(-1))


@dataclass(frozen=True)
class PreferenceLoss(abc.ABC):
    """A loss of pairs `(outputs, labels) -> (sum, number of pairs)`, with the rewards that its metrics show.

    Attributes:
        beta: the factor of the rewards; in ORPO the weight λ of the odds ratio.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta: expected a number above 0, found {self.beta}")
        if not 0 <= (smoothing := getattr(self, "label_smoothing", 0.0)) < 0.5:
            raise ValueError(f"label_smoothing: expected a number from 0 to below 0.5, found {smoothing}")

    @abc.abstractmethod
    def rewards(self, pairs: Pairs) -> Float[Array, "b 2"]:
        """Return the rewards of the chosen and the rejected answers."""

    @abc.abstractmethod
    def losses(self, pairs: Pairs) -> Float[Array, " b"]:
        """Return the loss of each pair."""

    def __call__(self, outputs: Any, labels: Any) -> Sum:
        """Return the sum of the losses, and the number of pairs. A router loss is added once per pair."""
        pairs = pairs_of(outputs, labels)
        total, number = _sum(self.losses(pairs), pairs)
        return with_router_loss(total, number, outputs), number

    @property
    def metrics(self) -> Mapping[str, tuple[Callable[[Any, Any], Sum], Mode]]:
        """The metrics by name, each with "max" if higher values are better."""
        values: dict[str, tuple[Callable[[Any], Any], Mode]] = {
            "margin": (lambda rewards: rewards[:, 0] - rewards[:, 1], "max"),
            "accuracy": (lambda rewards: (rewards[:, 0] > rewards[:, 1]).astype(rewards.dtype), "max"),
            "chosen_reward": (lambda rewards: rewards[:, 0], "max"),
            "rejected_reward": (lambda rewards: rewards[:, 1], "min"),
        }
        return {name: (functools.partial(self._mean, value), mode) for name, (value, mode) in values.items()}

    def _mean(self, value: Callable[[Any], Any], outputs: Any, labels: Any) -> Sum:
        pairs = pairs_of(outputs, labels)
        return _sum(value(self.rewards(pairs)), pairs)


@dataclass(frozen=True)
class DPO(PreferenceLoss):
    """Direct preference optimization (Rafailov et al. 2023): −log σ(r_c − r_r) with the rewards r = beta · (log π(y) − log π_ref(y)).

    Attributes:
        label_smoothing: the probability that a preference is the wrong way round (conservative DPO).
    """

    label_smoothing: float = 0.0

    def rewards(self, pairs: Pairs) -> Float[Array, "b 2"]:
        """Return beta times the log-ratio to the reference."""
        return self.beta * (pairs.log_probs - pairs.reference)

    def losses(self, pairs: Pairs) -> Float[Array, " b"]:
        """Return the logistic loss of the margin."""
        return _logistic(self.rewards(pairs), self.label_smoothing)


@dataclass(frozen=True)
class SimPO(PreferenceLoss):
    """Simple preference optimization (Meng et al. 2024): −log σ(r_c − r_r − gamma) with r = beta · log π(y) / tokens of y.

    Attributes:
        gamma: the margin that the rewards should have.
        label_smoothing: the same as in DPO.
    """

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    def rewards(self, pairs: Pairs) -> Float[Array, "b 2"]:
        """Return beta times the mean log-probability of a token."""
        return self.beta * pairs.means

    def losses(self, pairs: Pairs) -> Float[Array, " b"]:
        """Return the logistic loss of the margin above gamma."""
        return _logistic(self.rewards(pairs), self.label_smoothing, self.gamma)


@dataclass(frozen=True)
class ORPO(PreferenceLoss):
    """Odds-ratio preference optimization (Hong et al. 2024): −m_c − beta · log σ(log odds(m_c) − log odds(m_r)).

    m = log π(y) / tokens of y, and log odds(m) = m − log(1 − exp(m)).
    """

    def rewards(self, pairs: Pairs) -> Float[Array, "b 2"]:
        """Return beta times the mean log-probability of a token."""
        return self.beta * pairs.means

    def losses(self, pairs: Pairs) -> Float[Array, " b"]:
        """Return the cross-entropy of the chosen answer and the loss of the odds ratio."""
        means = jnp.minimum(pairs.means, -jnp.finfo(pairs.means.dtype).eps)  # an odds of exp(0) = 1 would be infinite
        odds = means - jnp.log(-jnp.expm1(means))
        return self.beta * _logistic(odds) - pairs.means[:, 0]


def _logistic(scores: Float[Array, "b 2"], smoothing: float = 0.0, least: float = 0.0) -> Float[Array, " b"]:
    """Return −log σ(score_c − score_r − least); with `smoothing` a share of the loss is for the opposite preference."""
    margin = scores[:, 0] - scores[:, 1] - least
    return -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)


def _sum(values: Float[Array, " b"], pairs: Pairs) -> Sum:
    """Return the sum over the pairs that count, and their number."""
    return jnp.where(pairs.counts, values, jnp.zeros((), values.dtype)).sum(), pairs.counts.sum().astype(jnp.float32)
