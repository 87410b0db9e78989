"""Description of one setting: default, help, unit, choices, range. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

OnResume = Literal["refused", "between", "said", "free"]  # explained in `checkpoint.resume_compatibility`


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Range of a number; None means no bound.

    Divisibility of sizes is checked in `batching`.

    Args:
        at_least: Smallest value.
        above: Exclusive lower bound.
        at_most: Largest value.
        below: Exclusive upper bound.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)

    def admits(self, value: float) -> bool:
        """Return whether the value is in the range."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def nearest(self, value: float) -> list[float]:
        """Return the closest value in the range as a list; [] if the value is inside, or beyond an exclusive bound only."""
        for bound, is_beyond in ((self.at_least, lambda edge: value < edge), (self.at_most, lambda edge: value > edge)):
            if bound is not None and is_beyond(bound):
                return [bound]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of `table.table`: a flag, and equally a key of a configuration file.

    The dataclass field provides everything except its name, group, type, choices and default, which `table` adds.

    Args:
        name: Name of the setting.
        group: Name of its section.
        kind: "int", "float", "bool" or "str"; for the values of a map also "Any", that is any JSON value.
        default: Default value.
        is_list: Whether it is a list of `kind`.
        is_map: Whether it maps strings to `kind`.
        optional: Whether it may be None.
        unit: Unit of its value.
        help: One line of help.
        choices: Allowed values (those of a `Literal`); empty if not restricted.
        aliases: Other names that users may type.
        refused: Values known elsewhere that are not supported here, with the reason.
        range: Range of a number.
        on_resume: Handling of a change of the setting when a run resumes.
        is_hidden: Whether `--help` leaves it out.
    """

    name: str = ""
    group: str = ""
    kind: str = ""
    default: Any = None
    is_list: bool = False
    is_map: bool = False
    optional: bool = False
    unit: str = ""
    help: str = ""
    choices: Sequence[str] = ()
    aliases: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    range: Range = Range()
    on_resume: OnResume = "said"
    is_hidden: bool = False


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    aliases: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
    on_resume: OnResume = "said",
    is_hidden: bool = False,
    **bounds: float,
) -> Any:
    """Return a dataclass field that describes itself as a setting.

    Args:
        default: Default value.
        unit: Unit of its value.
        refused: Values known elsewhere that are not supported here, with the reason, so that they are rejected instead of misread.
        is_hidden: Whether `--help` leaves it out.
        **bounds: Range of a number, as in `Range`. It is declared nowhere else.
    """
    row = Setting(help=help, unit=unit, aliases=tuple(aliases),
                  refused=dict(refused or {}), range=Range(**bounds), on_resume=on_resume, is_hidden=is_hidden)  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"setting": row})
    return field(default=default, metadata={"setting": row})


def read_range(group: type, name: str) -> Range:
    """Return the range of a setting."""
    [row] = [entry.metadata["setting"] for entry in fields(group) if entry.name == name]
    return row.range


fixed = partial(setting, on_resume="refused")
between_rollouts = partial(setting, on_resume="between")
free = partial(setting, on_resume="free")
