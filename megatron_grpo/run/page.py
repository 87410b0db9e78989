"""A page of memory that a process shares with its parent: the child writes that it lives, and the parent reads."""

from __future__ import annotations

import json
import mmap
import struct
from typing import Any

_HEAD = struct.Struct("<qdi")  # beats, seconds without one that are too many (0: it is not watched), bytes of the note


class Page:
    """Made before the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def beat(self, timeout: float, note: dict[str, Any]) -> None:
        """The child lives. timeout: seconds after which it should be taken for hung, 0 for never."""
        beats, *_ = _HEAD.unpack_from(self._memory)
        text = json.dumps(note).encode()[: mmap.PAGESIZE - _HEAD.size]
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, beats + 1, timeout, len(text))

    def look(self) -> tuple[int, float]:
        """(beats, timeout)."""
        beats, timeout, _ = _HEAD.unpack_from(self._memory)
        return beats, timeout

    def note(self) -> dict[str, Any]:
        """What the child wrote last; {} where it was stopped as it wrote."""
        *_, size = _HEAD.unpack_from(self._memory)
        try:
            return json.loads(self._memory[_HEAD.size : _HEAD.size + size])
        except ValueError:
            return {}
