"""Pictures on their way to rollout servers: each once, by key, as the bytes of its file. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_grpo.data.album import num_tokens
from megatron_grpo.data.eyes import Eyes
from megatron_grpo.servers import wire
from megatron_grpo.types import Picture

Shown = Sequence[tuple[int, Picture]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSend:
    """The pictures of some prompts. Their files are read when they are sent."""

    pictures: Mapping[str, Picture] = field(default_factory=dict)  # by key
    bounds: wire.Bounds | None = None

    @classmethod
    def of(cls, shown: Iterable[Shown], eyes: Eyes | None) -> ToSend:
        """shown: by each prompt. eyes: of the model."""
        bounds = wire.Bounds(min_pixels=eyes.min_pixels, max_pixels=eyes.max_pixels) if eyes else None
        return cls(pictures={picture.key: picture for one in shown for _, picture in one}, bounds=bounds)

    def but(self, known: Collection[str], keys: Iterable[str]) -> tuple[wire.SentPicture, ...]:
        """Those of these keys that are not known. Raises ConfigError where a file is not the one any more that it was."""
        return tuple(wire.SentPicture(key=key, data=self.pictures[key].data()) for key in dict.fromkeys(keys) if key not in known)


NOTHING = ToSend()


def on_the_wire(shown: Shown) -> tuple[wire.ShownPicture, ...]:
    return tuple(wire.ShownPicture(key=picture.key, place=place, tokens=num_tokens(picture)) for place, picture in shown)
