"""Parts of generated pages: tables, descriptions of machines, dates of measurements."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.shared import measuring

Files = Mapping[str, Mapping[str, Any]]
"""Contents of the result files of one machine, by benchmark."""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *lines])


def by_machine(files: Iterable[Mapping[str, Any]]) -> list[Files]:
    """Group the contents of result files by machine."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for content in files:
        found.setdefault(measuring.identity(content["machine"]), {})[content["benchmark"]] = content
    return [found[key] for key in sorted(found, key=str)]


def machine_heading(machine: Mapping[str, Any]) -> str:
    """Return the heading of a machine's chapter with the description of the machine."""
    sets = ", ".join(machine["instruction_sets"])
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    title = f"## {machine['cores']} cores of {machine['cpu']}" + (f", {machine['gpu']}" if machine["gpu"] else "")
    hardware = "; ".join(filter(None, (sets, f"{machine['memory_gib']} GiB", machine["system"])))
    about = f"{hardware}; Python {machine['python']};\n{packages}."
    return f"{title}\n\n{about}\n"


def measured(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return dates and commits of the measurements: of every seed, and of all results in a file that was added to."""
    marks = [
        mark
        for result in results.values()
        for mark in (result, *result.get("before", ()), *result.get("seeds", {}).values())
    ]
    commits = sorted({mark["commit"] for mark in marks if "commit" in mark})
    dates = sorted({mark["date"][:10] for mark in marks if "date" in mark})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured on {when}, commit {', '.join(commits)}."
