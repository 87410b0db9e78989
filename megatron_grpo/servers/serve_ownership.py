"""Who a rollout server belongs to, and of which version its weights are. Plain Python: the app asks it before it touches the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_grpo.servers.wire import LEASE_SECONDS, Claim


class Refused(Exception):
    """The caller does not own the server, or means other weights than it has. A sentence (HTTP 409)."""


@dataclass(frozen=True, slots=True)
class Tenure:
    """One stretch of time in which the owner and the weights stay what they are. What begins in one ends with it."""

    number: int


class Ownership:
    """Changes with claims, releases and pushes; each of them begins a new tenure, and nobody is answered from an older one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._owner: Claim | None = None
        self._heard = 0.0
        self.version: int | None = None  # of the weights; None: nobody has pushed any, or a push has not come to its end
        self.has_base = False  # this owner pushed weights that an adapter can be added to
        self.tenure = Tenure(0)

    @property
    def owner(self) -> str | None:
        """The run that has the server; None where nobody has, or was not heard of for a lease."""
        return self._owner.run if self._owner is not None and not self._has_lapsed() else None

    def claim(self, claim: Claim) -> bool:
        """The caller has the server. Returns whether it is new here: then there are no weights of anybody's, and no requests.

        A run that was started again takes over at once from its earlier process. Raises Refused for another run while the owner is heard
        of, and for an earlier process of the same run: one that was frozen, and thaws.
        """
        owner = self._owner
        if owner is not None and claim != owner:
            if claim.run != owner.run and not self._has_lapsed():
                silent = self._clock() - self._heard
                raise Refused(
                    f"run {owner.run!r} owns this server (heard of {silent:.0f} s ago; the server is free {LEASE_SECONDS:.0f} s after)"
                )
            if claim.run == owner.run and claim.incarnation < owner.incarnation:
                raise Refused(f"a later process of run {owner.run!r} owns this server")
        self._heard = self._clock()
        if claim == owner:
            return False
        self._owner = claim
        self._forget()
        return True

    def release(self, incarnation: str | None) -> None:
        self.require(incarnation)
        self._owner = None
        self._forget()

    def require(self, incarnation: str | None) -> None:
        """Renews the lease, also one that has lapsed and that nobody took. Raises Refused where the caller does not own the server."""
        if self._owner is None or incarnation != self._owner.incarnation:
            whose = f"run {self._owner.run!r}" if self._owner else "nobody"
            raise Refused(f"this server belongs to {whose}; claim it first")
        self._heard = self._clock()

    def require_version(self, version: int) -> None:
        if self.version is None:
            raise Refused(f"this server holds no weights of a version, and version {version} was asked for; push them first")
        if version != self.version:
            raise Refused(f"this server holds version {self.version}, and version {version} was asked for")

    def heard(self, tenure: Tenure) -> None:
        """The owner is still reading what it asked for in this tenure."""
        if tenure == self.tenure:
            self._heard = self._clock()

    def begin_push(self, *, keeps_base: bool) -> Tenure:
        """From the first byte of a push there is no version."""
        has_base = self.has_base and keeps_base
        self._forget()
        self.has_base = has_base
        return self.tenure

    def end_push(self, tenure: Tenure, version: int | None, *, is_base: bool) -> Tenure:
        """All of it has come. version None: an adapter is still to come. Raises Refused where somebody has claimed the server since."""
        if tenure != self.tenure:
            raise Refused("the server was claimed anew while the push ran, and holds no version")
        self.version, self.has_base = version, is_base
        return self.tenure

    def _has_lapsed(self) -> bool:
        return self._clock() - self._heard >= LEASE_SECONDS

    def _forget(self) -> None:
        self.version, self.has_base, self.tenure = None, False, Tenure(self.tenure.number + 1)
