"""PPO written from the paper in float64, a step at a time: Schulman et al. 2017, algorithm 1, eq. 7 and 9."""

import torch
from torch import Tensor
from torch.nn.functional import elu

from appo.algorithms.ops.distributions import HALF_LOG_TWO_PI
from appo.algorithms.ppo.config import PPOConfig
from appo.algorithms.runtime.learning.batches import Batch

Weights = dict[str, Tensor]


def forward(w: Weights, obs: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One observation [5] to logits, value and the next state [H]: a layer, a GRU if there is one, two heads."""
    x = elu(w["actor.encoder.encoders.0.0.weight"] @ obs + w["actor.encoder.encoders.0.0.bias"])
    if "actor.core.rnn.weight_ih_l0" in w:
        h = torch.zeros_like(state) if first else state
        of_x = w["actor.core.rnn.weight_ih_l0"] @ x + w["actor.core.rnn.bias_ih_l0"]
        of_h = w["actor.core.rnn.weight_hh_l0"] @ h + w["actor.core.rnn.bias_hh_l0"]
        (r_x, z_x, n_x), (r_h, z_h, n_h) = of_x.chunk(3), of_h.chunk(3)
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        x = state = (1 - z) * torch.tanh(n_x + r * n_h) + z * h
    logits = w["policy_head.linear.weight"] @ x + w["policy_head.linear.bias"]
    return logits, (w["value_head.weight"] @ x + w["value_head.bias"])[0], state


def log_prob_and_entropy(kind: str, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "categorical":
        log_p = logits - torch.logsumexp(logits, 0)
        return log_p[int(action[0])], -(log_p.exp() * log_p).sum()
    mean, log_std = logits.chunk(2)
    log_std = log_std.clamp(-5.0, 2.0)
    distance = (action.double() - mean) / log_std.exp()
    return (-0.5 * distance**2 - log_std - HALF_LOG_TWO_PI).sum(), (log_std + 0.5 + HALF_LOG_TWO_PI).sum()


def unroll(w: Weights, batch: Batch, segment: int, column: int, steps: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Logits and value of some steps from the start of a segment of `length` steps."""
    state, found = torch.zeros(0), []
    if batch.rnn_state.shape[-1]:
        state = batch.rnn_state[segment, column].double()
    for t in range(segment * length, segment * length + steps):
        logits, value, state = forward(w, batch.obs["obs"][t, column].double(), batch.first[t, column], state)
        found.append((logits, value))
    return found


def returns(w: Weights, batch: Batch, config: PPOConfig, length: int) -> tuple[Tensor, Tensor]:
    """Advantages and value targets [T, B], one step after the other."""
    rows, columns = batch.valid.shape
    advantage, target = torch.zeros(2, rows, columns, dtype=torch.float64)
    for b in range(columns):
        values: list[float] = []
        for segment in range(rows // length):
            last = segment == rows // length - 1
            values += [float(value.detach()) for _, value in unroll(w, batch, segment, b, length + last, length)]
        later = 0.0
        for t in reversed(range(rows)):
            if not batch.valid[t, b]:
                later = 0.0
                continue
            starts = bool(batch.first[t + 1, b])
            ends = bool(batch.terminated[t, b] or batch.truncated[t, b])
            if batch.terminated[t, b]:
                following = 0.0
            elif starts:
                final = batch.recorded["final_value"]
                following = float(final[t, b]) if len(final) else values[t]
            else:
                following = values[t + 1]
            difference = float(batch.reward[t, b]) + config.gamma * following - values[t]
            later = difference + (0.0 if ends or starts else config.gamma * config.gae_lambda * later)
            advantage[t, b], target[t, b] = later, later + values[t]
    return advantage, target


def step_loss(
    batch: Batch,
    config: PPOConfig,
    kind: str,
    place: tuple[int, int, Tensor, Tensor],
    advantage: Tensor,
    target: Tensor,
) -> Tensor:
    """The loss of one step: place is its row and column and what the network says there."""
    (t, b, logits, value), e = place, config.ppo_clip_ratio
    log_prob, entropy = log_prob_and_entropy(kind, logits, batch.action[t, b])
    ratio = (log_prob - batch.recorded["log_prob"][t, b].double()).exp()
    assert 0.05 < ratio < 20
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - e, 1 + e) * advantage)
    error = (value - target) ** 2
    if config.ppo_clip_value:
        before, limit = batch.recorded["value"][t, b].double(), config.ppo_clip_value
        error = torch.maximum(error, (before + (value - before).clamp(-limit, limit) - target) ** 2)
    return -surrogate + config.value_loss_coeff * error - config.exploration_loss_coeff * entropy


def learned(w: Weights, batch: Batch, config: PPOConfig, kind: str, orders: list[Tensor], length: int) -> Weights:
    """The weights after an iteration whose epochs take segments of `length` steps in these orders."""
    w = {name: x.detach().double().clone().requires_grad_() for name, x in w.items()}
    adam = torch.optim.Adam(
        w.values(), config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps
    )
    columns = batch.valid.shape[1]
    for epoch, order in enumerate(orders):
        if epoch == 0 or config.recompute_advantages:
            advantage, target = returns(w, batch, config, length)
            if config.normalize_advantages == "running":
                seen = advantage[batch.valid]
                advantage = (advantage - seen.mean()) / (seen.var(correction=0) + 1e-5).sqrt()
        for segments in torch.split(order, config.batch_size // length):
            places = []
            for segment, b in ((int(i) // columns, int(i) % columns) for i in segments):
                for i, (logits, value) in enumerate(unroll(w, batch, segment, b, length, length)):
                    t = segment * length + i
                    if batch.valid[t, b]:
                        places.append((t, b, logits, value))
            used = torch.stack([advantage[t, b] for t, b, _, _ in places])
            if config.normalize_advantages == "batch":
                used = (used - used.mean()) / used.std(correction=0).clamp(min=1e-3)
            losses = [
                step_loss(batch, config, kind, place, a, target[place[:2]])
                for a, place in zip(used, places, strict=True)
            ]
            loss = torch.stack(losses).mean()
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(w.values(), config.max_grad_norm)
            adam.step()
    return w
