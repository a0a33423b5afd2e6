"""Running statistics of environments that normalize: part of the policy, and in no checkpoint."""

from collections.abc import Iterator
from typing import Any

STATISTICS = {  # by the names of gymnasium, baselines, SB3
    **dict.fromkeys(("obs_rms", "observation_rms", "ob_rms"), "obs"),
    **dict.fromkeys(("return_rms", "ret_rms", "reward_rms", "rew_rms"), "reward"),
}


def own_normalization(env: Any) -> tuple[str, ...]:
    """Return a line about wrappers that normalize by running statistics of their own; () if there are none."""
    found = {
        type(layer).__name__: own
        for layer in _held(env, set())
        if (own := {name for name, value in vars(layer).items() if value is not None}.intersection(STATISTICS))
    }
    if not found:
        return ()
    shows, pays = (
        any(kind == STATISTICS[name] for own in found.values() for name in own) for kind in ("obs", "reward")
    )
    paid = ", and returns are of normalized rewards" * pays
    helps = ["--normalize_input=True"] * shows
    helps += ["--normalize_returns=True (where the algorithm lacks it: --reward_scale)"] * pays
    line = (
        f"the environment normalizes by statistics of its own ({', '.join(found)}): every copy of it"
        f" begins with fresh ones, no checkpoint keeps them{paid}; leave that out, and give {' and '.join(helps)}"
    )
    return (line,)


def _held(env: Any, known: set[int]) -> Iterator[Any]:
    """Yield an environment and the environments in its attributes, of lists only the first."""
    if id(env) in known or not hasattr(env, "__dict__"):
        return
    known.add(id(env))
    yield env
    for value in list(vars(env).values()):
        one = value[0] if isinstance(value, list | tuple) and value else value
        if callable(getattr(one, "step", None)) and callable(getattr(one, "reset", None)):
            yield from _held(one, known)
