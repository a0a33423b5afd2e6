"""`--verify_reproduction`: what was published is kept for late steps, and no longer."""

from dataclasses import replace

import torch

from appo.algorithms.parts.verify import VerifyingLearner
from tests.unit.appo.batches import SPEC, batch_of, learner_of
from tests.unit.models.cases import CORES

LAG = 3


def test_only_versions_that_a_batch_can_contain_are_kept() -> None:
    learner = learner_of(model=CORES["none"], learning_rate=0.0)
    verifying = VerifyingLearner(learner, SPEC, LAG)
    acted = []
    for number in range(8):
        batch = batch_of(learner.model, noise=0.0, seed=number)  # with the statistics of this version
        # A column may have been chosen while the learner trained on the batch before.
        acted.append(replace(batch, policy_version=torch.full_like(batch.policy_version, verifying.version)))
        assert sum(1 for _ in verifying.learn(acted[max(0, number - LAG)], 0.0)) == 1
        newest = verifying.version
        assert [*verifying.published] == [*range(max(1, newest - LAG - 1), newest + 1)]
    assert newest == 9
    assert verifying.compared > 0
    assert verifying.largest < 1e-5
