"""The vocabularies of other systems: their batch sizes as products of their own flags, and what each of their other names is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_grpo.compat.explain import explain, length_there
from megatron_grpo.config.foreign import Dialect, Product

__all__ = ["DIALECTS", "explain", "length_there", "products_of"]


class _Dialects(Mapping[str, Dialect]):
    """By what --dialect takes, `swift` being short for `swift-megatron`. Its table is read when a system is asked for."""

    names = ("trl", "skyrl", "skyrl-doc", "swift-megatron", "swift", "ms-swift", "cs336", "verl", "slime")

    def __getitem__(self, name: str) -> Dialect:
        from megatron_grpo.compat.tables import load

        if name not in self.names:
            raise KeyError(name)
        return load(name.removesuffix("-megatron").replace("-", "_"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


DIALECTS = _Dialects()


def products_of(name: str | None) -> Mapping[str, Product] | None:
    """What our sizes are made of in that dialect; None without one."""
    return DIALECTS[name].products if name else None
