"""Contenders that are trained on several seeds, taking turns; what came of a run is kept as soon as it has ended.

Their results are `{"seeds": {seed: outcome}}`; every outcome says when and of which commit it is.
"""

import argparse
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, Protocol

from benchmarks.shared import measuring, runs
from benchmarks.shared.runs import RunError


class Outcome(Protocol):
    """Outcome of a run: a NamedTuple that can be said in a line."""

    def _asdict(self) -> dict[str, Any]: ...

    def line(self) -> str:
        """For the terminal."""
        ...


def parser_of(description: str, names: Iterable[str], flag: str = "--contender") -> argparse.ArgumentParser:
    """The flags that all of these benchmarks have; `flag` chooses among the names."""
    known = tuple(names)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="(default 1 2 3)")
    wanted = f"of {', '.join(known)}"
    parser.add_argument(flag, dest="names", nargs="*", choices=known, default=known, metavar="NAME", help=wanted)
    parser.add_argument("--add", action="store_true", help="train only what the file does not hold yet")
    runs.add_file_arguments(parser)
    return parser


def train_all(
    benchmark: str, arguments: argparse.Namespace, train: Callable[[str, int], Outcome]
) -> dict[str, dict[str, Any]]:
    """Train every contender that was asked for on every seed, by name and seed; the results by name.

    Raises:
        UsageError: the file is another benchmark's or another machine's.
        RunError: runs have failed, of which this is the last; all others have been trained.
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
    """Print and write the table of the results, those that the file held before included; all of them."""
    if arguments.json is not None:
        results = measuring.read(arguments.json)["results"]
    text = table(results)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text, encoding="utf-8")
    return results
