"""What one setting says of itself: default, help, unit, choices, range. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

OnResume = Literal["refused", "between", "said", "free"]  # `checkpoint.resume_compatibility` says what they mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a setting may be; None is no bound. Sizes that must divide are the business of `batching`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)

    def admits(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def nearest(self, value: float) -> list[float]:
        """The closest number inside, where there is one."""
        for bound, is_beyond in ((self.at_least, lambda edge: value < edge), (self.at_most, lambda edge: value > edge)):
            if bound is not None and is_beyond(bound):
                return [bound]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of `table.table`: a flag, and equally a key of a configuration file. Its field knows all but where it stands."""

    name: str = ""
    group: str = ""
    kind: str = ""  # "int", "float", "bool" or "str"; of a map also "Any": whatever JSON can say
    default: Any = None
    is_list: bool = False
    is_map: bool = False  # values of `kind` by words
    optional: bool = False
    unit: str = ""
    help: str = ""
    choices: Sequence[str] = ()
    aliases: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)  # value -> why it is not a choice here
    range: Range = Range()
    on_resume: OnResume = "said"


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    aliases: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
    on_resume: OnResume = "said",
    **bounds: float,
) -> Any:
    """A dataclass field that knows how to present itself. `aliases` are other names that users of TRL or Megatron type.

    refused: values known elsewhere and not here, with the reason, so that nobody trains something else believing it is this.
    bounds: the range of a number, see `Range`. It stands nowhere else.
    """
    row = Setting(help=help, unit=unit, choices=tuple(choices), aliases=tuple(aliases), refused=dict(refused or {}),
                  range=Range(**bounds), on_resume=on_resume)  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"setting": row})
    return field(default=default, metadata={"setting": row})


fixed = partial(setting, on_resume="refused")
between_rollouts = partial(setting, on_resume="between")
free = partial(setting, on_resume="free")
