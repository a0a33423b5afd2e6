"""Contenders trained in turns on several seeds, each outcome saved at the end of its run.

Results are `{"seeds": {seed: outcome}}`; every outcome contains date and commit.
"""

import argparse
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, Protocol

from benchmarks.shared import measuring, runs
from benchmarks.shared.runs import RunError


class Outcome(Protocol):
    """Outcome of a run: a NamedTuple with a one-line summary."""

    def _asdict(self) -> dict[str, Any]: ...

    def line(self) -> str:
        """Return the summary."""
        ...


def parser_of(description: str, names: Iterable[str], flag: str = "--contender") -> argparse.ArgumentParser:
    """Return a parser with the common flags; `flag` selects among the names."""
    known = tuple(names)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="seeds (default 1 2 3)")
    wanted = f"of {', '.join(known)}"
    parser.add_argument(flag, dest="names", nargs="*", choices=known, default=known, metavar="NAME", help=wanted)
    parser.add_argument("--add", action="store_true", help="train only the runs that the file lacks")
    runs.add_file_arguments(parser)
    return parser


def train_all(
    benchmark: str, arguments: argparse.Namespace, train: Callable[[str, int], Outcome]
) -> dict[str, dict[str, Any]]:
    """Train every selected contender on every seed; return the results by name.

    Raises:
        UsageError: the file belongs to another benchmark or another machine.
        RunError: last failure; all other runs were trained.
    """
    measuring.check(arguments.json, benchmark)
    kept = {name: measuring.earlier(arguments.json, name) if arguments.add else {} for name in arguments.names}
    results = {name: {"seeds": dict(before.get("seeds", {}))} for name, before in kept.items()}
    failed: RunError | None = None
    for seed, (name, result) in product(arguments.seeds, results.items()):
        said = "kept"
        if str(seed) not in result["seeds"]:
            try:
                outcome = train(name, seed)
            except RunError as error:
                failed, said = error, f"failed: {error}"
            else:
                result["seeds"][str(seed)] = {**outcome._asdict(), **measuring.provenance()}
                measuring.save(arguments.json, benchmark, {name: result})
                said = outcome.line()
        print(f"{name}: seed {seed}: {said}", flush=True)
    if failed is not None:
        raise failed
    return results


def show(
    arguments: argparse.Namespace,
    results: dict[str, dict[str, Any]],
    table: Callable[[dict[str, dict[str, Any]]], str],
) -> dict[str, dict[str, Any]]:
    """Print the table of all results in the file and write the table to `--markdown`; return the results."""
    if arguments.json is not None:
        results = measuring.read(arguments.json)["results"]
    text = table(results)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text, encoding="utf-8")
    return results
