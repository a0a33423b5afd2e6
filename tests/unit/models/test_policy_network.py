"""A network that acts without values: acting, unrolling, playing and exporting show none."""

import torch

from appo.algorithms.models.build import build_model, let_act
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.policy_network import build_policy_network
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.player import Player, cheapest
from tests.unit.models.cases import GAUSSIAN, config_of, env_spec_of, observation

SPEC = env_spec_of(*GAUSSIAN)


def test_it_is_the_policy_of_an_actor_critic() -> None:
    """The first weights of all layers but the layer of the values are those of the same seed."""
    weights = []
    for build in (build_policy_network, build_model):
        torch.manual_seed(5)
        weights.append(dict(build(config_of(use_rnn=False), SPEC).named_parameters()))
    for name, weight in weights[0].items():
        if name.startswith("tower"):
            assert torch.equal(weight, weights[1][name.replace("tower", "actor", 1)])


def test_unrolling_repeats_acting() -> None:
    torch.manual_seed(0)
    network = build_policy_network(config_of(rnn_type="gru"), SPEC)
    obs, first = observation(SPEC, 6, 3), torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) < 0.3
    begin = state = torch.randn(3, network.rnn_state_size, generator=torch.Generator().manual_seed(2))
    acted = []
    for t in range(6):
        logits, value, state = network.act({key: x[t] for key, x in obs.items()}, first[t], state)
        acted.append(logits)
        assert value is None
    torch.testing.assert_close(network.unroll_all(obs, first, begin[None]), torch.stack(acted))


def test_its_policy_and_its_file_have_no_value() -> None:
    flat = FlatModule(build_policy_network(config_of(use_rnn=False), SPEC))
    let_act(flat, config_of(use_rnn=False), "bf16", "cpu")
    policy = StochasticPolicy(flat, SPEC, ("log_prob",))
    obs, first = observation(SPEC, 4), torch.ones(4, dtype=torch.bool)
    with torch.inference_mode():
        recorded, _ = policy.act(obs, first, torch.zeros(4, 0), None, policy.random(0, 4))
        assert policy.final(obs, first, torch.zeros(4, 0)) == {}
    assert recorded.keys() == {"action", "log_prob"}
    player = Player(policy, SPEC, EvaluationConfig(deterministic=True), 0)
    assert cheapest(player, 0, deterministic=True) is player
    assert player.act({key: x[:1].numpy() for key, x in obs.items()}, first[:1].numpy()).shape == (1, 3)
