"""Maths of soft actor-critic: targets with entropy, the losses of critics and policy, the gradient of the temperature.

Source: Haarnoja et al. 2018, arXiv:1812.05905; the sums of n rewards carry no entropy between their steps.
"""

from torch import Tensor

from appo.algorithms.ops.q_learning import n_step_target


def soft_target(reward: Tensor, discount: Tensor, q: Tensor, log_prob: Tensor, temperature: Tensor) -> Tensor:
    """Return R + discount * (min_n Q_n(s', a') - alpha log pi(a'|s')), [B] (eq. 3 and 6).

    Args:
        reward: [B] discounted sum of n rewards.
        discount: [B] gamma^n; 0 after a terminated step, where the values do not count.
        q: [N, B] values by the target networks of actions drawn after the n steps.
        log_prob: [B] of these actions.
        temperature: scalar alpha.
    """
    return n_step_target(reward, discount, q.amin(0) - temperature * log_prob)


def critic_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over critics of the weighted mean of (Q_n - y)^2 / 2, scalar (eq. 5).

    Values q are [N, B], targets and weights [B].
    """
    return 0.5 * ((q - target).square() * weight).mean(-1).sum()


def policy_loss(q: Tensor, log_prob: Tensor, temperature: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean of alpha log pi(a|s) - min_n Q_n(s, a), scalar (eq. 7 and 9).

    Values q of drawn actions are [N, B], log-probabilities and weights [B]; weights have the mean 1.
    """
    return (weight * (temperature * log_prob - q.amin(0))).mean()


def temperature_gradient(log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return -mean(log pi + target entropy), scalar: the gradient of eq. 18 by log alpha, divided by alpha.

    The logarithm keeps alpha positive, and steps do not shrink with alpha.
    """
    return -(log_prob + target_entropy).mean()
