"""Flags that several learners of one policy do not support."""

from typing import Any

from appo.algorithms.datasets.config import InputConfig
from appo.algorithms.run.algorithms import find_algorithm
from appo.utils.errors import UsageError


def check_ranks(config: Any) -> None:
    """Refuse flags of a run (`Config`) that several learners of one policy do not support (UsageError)."""
    run, sampling, algorithm, learning = config.run, config.sampling, config.algorithm, config.learning
    if run.num_learners == 1:
        return
    flag = f"--num_learners={run.num_learners}"
    if not vars(type(find_algorithm(run.algo))).get("with_ranks"):  # a subclass may train networks of its own
        raise UsageError(f"{flag}: several learners are for APPO, PPO, APEX and SAC, not --algo={run.algo}")
    others = {
        f"--num_policies={sampling.num_policies}": sampling.num_policies > 1,
        "--self_play": config.population.self_play,
        "--lockstep": sampling.lockstep,
        "--deterministic_resume": run.deterministic_resume,
        "--sampler_only": sampling.sampler_only,
        "--verify_reproduction": config.logging.verify_reproduction,
        "--output": bool(config.output.output),
        "--input": isinstance(learning, InputConfig) and bool(learning.mix.datasets),
        "--save_replay": getattr(learning, "save_replay", False),
        f"--microbatch_size={getattr(learning, 'microbatch_size', 0)}, by which batches stream,": algorithm.streams(
            learning
        ),
    }
    if refused := [name for name, is_asked in others.items() if is_asked]:
        raise UsageError(f"{refused[0]} does not go with {flag}")
