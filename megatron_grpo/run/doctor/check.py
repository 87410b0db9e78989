"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """found: what is there, in words. remedy: a sentence with what to do, or what an absence switches off; "" where all is well."""

    name: str
    status: Literal["ok", "absent", "fails"]
    found: str
    remedy: str = ""


def good(name: str, found: str) -> Check:
    return Check(name=name, status="ok", found=found)


def absent(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, status="absent", found=found, remedy=remedy)


def bad(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, status="fails", found=found, remedy=remedy)
