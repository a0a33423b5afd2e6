"""Flags of datasets, and of what learns from them; needs neither torch nor numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from algorithms.parts.config import STEP_METRICS, ColumnsConfig
from utils.errors import UsageError
from utils.flags import flag
from utils.values import shown

COMPRESSIONS = ("none", "lz4", "zstd")
LOGITS = "logits"
COLUMNS = (LOGITS, "log_prob", "value", "policy_version")
"""What can be stored of the policy that acted."""


@dataclass(frozen=True)
class OutputConfig:
    """How datasets are written."""

    output: str = flag(
        "", "folder of the dataset of whole episodes that is written, in Minari's format on Arrow; empty = none"
    )
    output_max_file_size: int = flag(
        64 << 20,
        "bytes after which a new part of the dataset begins; a part appears when it is whole",
        minimum=1,
        needs="output",
    )
    output_columns: tuple[str, ...] = flag(
        COLUMNS,
        "what is stored of the policy that acted, as arrays in the infos, as far as the algorithm records it",
        harmless=True,
        needs="output",
    )
    output_compression: str = flag(
        "lz4",
        "compression of the arrays, which every reader of Arrow undoes",
        choices=COMPRESSIONS,
        needs="output",
    )

    def check(self) -> None:
        """Refuse columns that nobody records (UsageError)."""
        for name in self.output_columns:
            if name not in COLUMNS:
                raise UsageError(f"--output_columns={shown(name)} is none of {', '.join(COLUMNS)}")


@dataclass(frozen=True)
class RunOutputConfig(OutputConfig):
    """Output."""

    output_memory_mb: int = flag(
        512,
        "memory for episodes that have no end yet, and a quarter of it for trajectories that wait to be written, with"
        " output; what has no room is left out, and counted",
        minimum=1,
        needs="output",
    )


SAMPLER = "sampler"
"""The word that stands for actors among the sources of `--input`."""


class Mix(NamedTuple):
    """Where the steps of a batch come from.

    Attributes:
        sampler: share that actors have played.
        datasets: words of datasets that are read as one, and their share.
    """

    sampler: float
    datasets: tuple[tuple[tuple[str, ...], float], ...]

    @property
    def words(self) -> tuple[str, ...]:
        """All datasets."""
        return tuple(word for words, _ in self.datasets for word in words)

    def played(self, units: int) -> int:
        """Return how many units of a batch actors have played, at least one; of one alone no part is read.

        >>> Mix(0.25, ((("a",), 0.75),)).played(8)
        2
        """
        return units if not self.datasets else max(1, units - max(1, round((1.0 - self.sampler) * units)))


def mix_of(words: Sequence[str]) -> Mix:
    """Return what `--input` says: words alone, or `word:share` of each, in braces or not.

    >>> mix_of(["{sampler:0.5", "a:0.3", "b:0.2}"])
    Mix(sampler=0.5, datasets=((('a',), 0.3), (('b',), 0.2)))

    Raises:
        UsageError: the shares are not shares of one.
    """
    pairs = [_word_and_share(word.strip("{}'\" ")) for word in words]
    shares = [share for _, share in pairs if share is not None]
    names = [name for name, _ in pairs]
    if shares and len(shares) < len(pairs):
        raise UsageError("--input: every source needs a share, or none of them, as in sampler:0.5,DATASET:0.5")
    if not names or (names == [SAMPLER] and shares in ([], [1.0])):
        return Mix(1.0, ())
    if not shares:
        if SAMPLER in names:
            raise UsageError("--input: say what share of a batch comes from where, as in sampler:0.5,DATASET:0.5")
        return Mix(0.0, ((tuple(names), 1.0),))
    if len(set(names)) < len(names):
        raise UsageError("--input: a source stands there twice: give it the sum of its shares")
    are_shares = min(shares) > 0 and abs(sum(shares) - 1.0) <= 1e-6  # no comparison with nan is true
    if not are_shares:
        raise UsageError(f"--input: the shares of all sources must be above 0 and add up to 1, not to {sum(shares):g}")
    found = dict(zip(names, shares, strict=True))
    return Mix(found.pop(SAMPLER, 0.0), tuple(((name,), share) for name, share in found.items()))


def _word_and_share(word: str) -> tuple[str, float | None]:
    name, _, number = word.rpartition(":")
    try:
        return (name, float(number)) if name else (word, None)
    except ValueError:
        return word, None


@dataclass(frozen=True)
class InputConfig:
    """Where what is learned from comes from."""

    input: tuple[str, ...] = flag(
        (),
        "datasets that are learned from: folders in Minari's format, patterns of such, or package.module:function of"
        " yours that returns spaces and episodes; separated by commas. As word:share they are mixed in every batch,"
        " with sampler as the word for what actors play: sampler:0.5,DATASET:0.5; empty = sampler",
    )
    shuffle_buffer_size: int = flag(
        0,
        "steps, of whole episodes, that are in memory at a time and among which the order is drawn; that of episodes is"
        " drawn for each epoch; 0 = all steps of the datasets",
        minimum=0,
        needs="input",
    )
    postprocess_inputs: str = flag(
        "",
        "function of yours, package.module:function, that is given each Episode as it is read and returns it, or one"
        " of the same length; empty = none",
        needs="input",
    )

    @property
    def mix(self) -> Mix:
        """Where the steps of a batch come from."""
        return mix_of(self.input)


@dataclass(frozen=True)
class EvaluatedInputConfig(InputConfig):
    """The same, and how a policy is measured that learns without an environment."""

    input_evaluation: str = flag(
        "none",
        "how the policy is measured while it learns from files: none, or simulation = by episodes in --env beside it,"
        " as --eval_every_sec (10 where that is not given)",
        choices=("none", "simulation"),
    )


@dataclass(frozen=True)
class CloningConfig(EvaluatedInputConfig, ColumnsConfig):
    """Learning."""

    learning_rate: float = flag(1e-3, "step size of Adam", minimum=0, mutation="scale", mutation_range=(1e-8, 1.0))
    rollout: int = flag(32, "steps of the datasets that are read in a row, as one trajectory of a batch", minimum=1)
    batch_size: int = flag(
        1024,
        "samples (steps of the datasets) of a batch, a multiple of rollout",
        minimum=1,
        mutation="samples",
    )
    num_batches_per_iteration: int = flag(1, "batches that are read for one optimizer step on all of them", minimum=1)
    gamma: float = flag(
        0.99, "discount per step; BC estimates no return and has no use for it", minimum=0, maximum=1, needs="returns"
    )
    normalize_returns: bool = flag(
        True,
        "let the critic predict returns in units of their running standard deviation; BC trains no critic",
        fixed_on_resume=True,
        needs="returns",
    )

    def check(self) -> None:
        """Refuse flags that contradict each other, or name nothing to learn from (UsageError)."""
        super().check()
        if self.mix.sampler and self.input:
            raise UsageError("--input: datasets alone are cloned, without sampler")
        if not self.input:
            raise UsageError("--input is required: a dataset to learn from; appo record writes some")


@dataclass(frozen=True)
class MarwilConfig(CloningConfig):
    """Learning."""

    beta: float = flag(
        1.0,
        "factor of the advantage in the exponent of a step's weight: what turned out better is imitated more; 0 = all"
        " steps alike",
        minimum=0,
        maximum=100,
    )
    max_weight: float = flag(20.0, "limit of the weight exp(beta * advantage / c) of a step", minimum=1)
    advantage_norm_rate: float = flag(
        0.01, "share of a batch in the running mean square of advantages, c^2", minimum=0, maximum=1
    )
    value_loss_coeff: float = flag(
        1.0, "weight of the value loss", minimum=0, mutation="scale", mutation_range=(1e-3, 1e2)
    )
    gae_lambda: float = flag(
        1.0,
        "mixing of n-step estimates by GAE; 1 = rewards to the end of the trajectory, then the critic's value",
        minimum=0,
        maximum=1,
    )


CLONING_METRICS = {
    "loss": "mean cross entropy of what was done, in nats",
    "entropy": "mean entropy of the policy",
    "agreement": "share of steps in which the most probable action is what was done; of continuous ones, 0",
    **STEP_METRICS,
}
"""What the learner of BC reports, in this order."""

MARWIL_METRICS = {
    "loss": "weighted sum of the losses below",
    "policy_loss": "mean cross entropy of what was done, weighted by exp(beta * advantage / c)",
    "value_loss": "squared error of the critic, in the critic's units",
    "entropy": "mean entropy of the policy",
    "advantage_norm": "c, by which advantages are divided, in units of return",
    "weight_mean": "mean weight of a step",
    "weight_max": "largest weight of a step",
    **STEP_METRICS,
}
"""What the learner of MARWIL reports, in this order."""
