"""A flag is a dataclass field: its type, default, limits, choices and help are declared once, in one place."""

import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, Union, cast

from appo.utils.errors import UsageError

T = TypeVar("T")

Kind = Literal["int", "float", "bool", "str", "ints", "strs", "dict"]
Mutation = Literal["scale", "samples"]
"""How population-based training changes a value: times or divided by a random factor; the same in whole rollouts."""

KINDS: dict[object, Kind] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    tuple[int, ...]: "ints",
    tuple[str, ...]: "strs",
    dict[str, object]: "dict",
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A command line flag, declared as a dataclass field.

    Attributes:
        choices: allowed texts.
        synonyms: accepted spelling -> choice.
        minimum, maximum: inclusive limits, of every element of a tuple.
        mutation: kind of change in population-based training.
        mutation_range: inclusive range of mutations.
        fixed_on_resume: a resumed run cannot change the value; with the name of a flag, if that flag is on.
        aliases: other names.
        alone: meaning of the name without a value; None: a value is required.
        negated: choice that `--no_NAME`, with the name or an alias, selects; empty: only booleans have a negation.
        harmless: no value can run, read, write or send anything; None: true for numbers and choices, false for texts.
        before: value in runs saved before the flag existed; None: that of the preset, or the default.
        elements: words that a list may contain, for messages.
        needs: conditions for an effect, see `missing`.
    """

    name: str
    kind: Kind
    optional: bool
    default: object
    help: str
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    minimum: float | None = None
    maximum: float | None = None
    mutation: Mutation | None = None
    mutation_range: tuple[float, float] | None = None
    fixed_on_resume: bool | str = False
    aliases: tuple[str, ...] = ()
    alone: str | None = None
    negated: str = ""
    harmless: bool | None = None
    before: object = None
    elements: str = ""
    needs: str = ""

    def missing(self, values: Mapping[str, object]) -> str | None:
        """Return the first part of `needs` that does not hold; None if all parts hold.

        Blanks separate the parts, `|` separates the alternatives of a part: the name of a value that must be neither 0
        nor empty, `name=pattern` for the text of a value, or `name>number`. An alternative without a value holds.
        """
        return next((part for part in self.needs.split() if not any(_holds(a, values) for a in part.split("|"))), None)

    def is_fixed(self, saved: Mapping[str, object]) -> bool:
        """Return whether a resumed run with saved flags cannot change the value."""
        return self.fixed_on_resume is True or bool(saved.get(str(self.fixed_on_resume)))

    @property
    def negations(self) -> tuple[str, ...]:
        """Return the names that switch the flag off."""
        names = (self.name,) if self.kind == "bool" else (self.name, *self.aliases) if self.negated else ()
        return tuple(name.removeprefix("no_") if name.startswith("no_") else f"no_{name}" for name in names)

    @property
    def reaches_out(self) -> bool:
        """Return whether a value could run, read, write or send something: a stranger's value needs trust."""
        if self.harmless is not None:
            return not self.harmless
        return self.kind in ("str", "strs", "dict") and not self.choices


def flag(  # noqa: PLR0913 (a declaration reads best flat, and all but two are keywords)
    default: T,
    help: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    mutation: Mutation | None = None,
    mutation_range: tuple[float, float] | None = None,
    fixed_on_resume: bool | str = False,
    aliases: Sequence[str] = (),
    synonyms: Mapping[str, str] | None = None,
    alone: str | None = None,
    negated: str = "",
    harmless: bool | None = None,
    before: T | None = None,
    elements: str = "",
    needs: str = "",
) -> T:
    """Declare a flag: the default and description of a dataclass field (see `Flag` for the arguments)."""
    # All arguments but the default, as `Flag` takes them.
    metadata = locals() | {"choices": tuple(choices), "synonyms": dict(synonyms or {}), "aliases": tuple(aliases)}
    del metadata["default"]
    if isinstance(default, dict):
        return cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def _holds(alternative: str, values: Mapping[str, object]) -> bool:
    name, equals, pattern = alternative.partition("=")
    name, above, number = name.partition(">")
    if name not in values:
        return True
    value: Any = values[name]
    return value > float(number) if above else fnmatchcase(str(value), pattern) if equals else bool(value)


def same_flag(cls: type, name: str, help: str = "", **changed: Any) -> Any:
    """Declare a flag of another dataclass again, with the same default, limits and description."""
    declared = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    changed = {"default": _default_of(declared), **declared.metadata, **({"help": help} if help else {}), **changed}
    return flag(**changed)


def flags_of(cls: type) -> dict[str, Flag]:
    """Return the flags of a dataclass, in the order of declaration.

    Raises:
        TypeError: a field was not declared with `flag`, or the type is not supported.
    """
    flags, annotations = {}, typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, annotation = field.name, annotations[field.name]
        optional = typing.get_origin(annotation) in (Union, types.UnionType)
        if optional:
            (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
        if "help" not in field.metadata or annotation not in KINDS:
            raise TypeError(f"field {name}: {annotation} is not a flag")
        flags[name] = Flag(name, KINDS[annotation], optional, _default_of(field), **field.metadata)
    return flags


def flattened(values: Mapping[str, object], parts: Mapping[str, Mapping[str, Flag]], source: str) -> dict[str, object]:
    """Return value by flag from values that may be grouped by part; paths become text.

    Raises:
        UsageError: a flag is given twice, or in the wrong part.
    """
    flat: dict[str, object] = {}
    for title, value in values.items():
        inside = value if title in parts and isinstance(value, Mapping) else None
        for word, element in ({title: value} if inside is None else inside).items():
            if not isinstance(word, str):
                raise UsageError(f"{source}: {word} is no name of a flag")
            name = word.replace("-", "_")  # as on the command line
            if name in flat:
                raise UsageError(f"{source}: {name} is there twice")
            home = next((part for part, flags in parts.items() if name in flags), title)
            if inside is not None and home != title:
                raise UsageError(f"{source}: {name} is a flag of {home}, not of {title}")
            flat[name] = os.fspath(element) if isinstance(element, os.PathLike) else element
    return flat


def _default_of(field: "dataclasses.Field[Any]") -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
