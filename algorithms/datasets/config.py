"""Flags for writing, reading and mixing datasets. Imports neither torch nor numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from appo.utils.errors import UsageError
from appo.utils.flags import flag
from appo.utils.values import shown

COMPRESSIONS = ("none", "lz4", "zstd")
LOGITS = "logits"
POLICY_VERSION = "policy_version"
"""Info with the version of the acting weights."""
COLUMNS = (LOGITS, "log_prob", "value", POLICY_VERSION)
"""Columns about the acting policy that can be stored."""


@dataclass(frozen=True)
class OutputConfig:
    """Writing of datasets."""

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
        "lz4", "compression of the arrays, which every reader of Arrow undoes", choices=COMPRESSIONS, needs="output"
    )

    def check(self) -> None:
        """Refuse unknown columns (UsageError)."""
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
"""The word for actors among the sources of `--input`."""


class Mix(NamedTuple):
    """Sources of the steps of a batch.

    Attributes:
        sampler: share of actors.
        datasets: words of datasets that are read as one, and their share.
    """

    sampler: float
    datasets: tuple[tuple[tuple[str, ...], float], ...]

    @property
    def words(self) -> tuple[str, ...]:
        """All words of datasets."""
        return tuple(word for words, _ in self.datasets for word in words)

    def played(self, units: int) -> int:
        """Return the units of a batch that actors play, at least one; a single unit has no part from datasets.

        >>> Mix(0.25, ((("a",), 0.75),)).played(8)
        2
        """
        return units if not self.datasets else max(1, units - max(1, round((1.0 - self.sampler) * units)))


def mix_of(words: Sequence[str]) -> Mix:
    """Return the mix in `--input`: words alone, or `word:share` for each, with or without braces.

    >>> mix_of(["{sampler:0.5", "a:0.3", "b:0.2}"])
    Mix(sampler=0.5, datasets=((('a',), 0.3), (('b',), 0.2)))

    Raises:
        UsageError: the shares do not add up to one.
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
    """Sources of experience."""

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
        """Sources of the steps of a batch."""
        return mix_of(self.input)


@dataclass(frozen=True)
class EvaluatedInputConfig(InputConfig):
    """Sources of experience, and evaluation of a policy that learns without an environment."""

    input_evaluation: str = flag(
        "none",
        "how the policy is measured while it learns from files: none, or simulation = by episodes in --env beside it,"
        " as --eval_every_sec (10 where that is not given)",
        choices=("none", "simulation"),
    )
