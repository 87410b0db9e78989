"""Ownership of a rollout server and the weight version that it may answer with. No engine; a clock that the test advances."""

from __future__ import annotations

import pytest

from megatron_grpo.plugins.servers.serve_state import Ownership, RequestRefusedError
from megatron_grpo.plugins.servers.wire import LEASE_SECONDS, ClaimRequest


class ManualClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def own(clock):
    return Ownership(clock)


def sync_version(own: Ownership, incarnation: str = "1", version: int = 3) -> None:
    own.claim(ClaimRequest(run="mine", incarnation=incarnation))
    own.end_update(own.begin_update(keeps_base=False), version, is_base=True)


def test_ownership_of_new_server_rejects_requests(own):
    with pytest.raises(RequestRefusedError, match="has no owner; claim it first"):
        own.require("1")
    with pytest.raises(RequestRefusedError, match="has no weights, but version 0 was requested"):
        own.require_version(0)
    with pytest.raises(RequestRefusedError):
        own.require(None)  # no header is not nobody's


def test_ownership_rejects_other_run_until_lease_expires(own, clock):
    sync_version(own)
    clock.now += LEASE_SECONDS - 1
    with pytest.raises(RequestRefusedError, match=r"run 'mine' owns this server \(last request 59 s ago; it is released 60 s after that\)"):
        own.claim(ClaimRequest(run="other", incarnation="9"))
    own.require("1")  # heard of: the lease begins again
    clock.now += LEASE_SECONDS - 1
    with pytest.raises(RequestRefusedError):
        own.claim(ClaimRequest(run="other", incarnation="9"))
    clock.now += 1
    assert own.owner is None
    assert own.claim(ClaimRequest(run="other", incarnation="9"))
    assert own.owner == "other" and own.version is None and not own.has_base
    with pytest.raises(RequestRefusedError, match="belongs to run 'other'"):
        own.require("1")


def test_ownership_of_expired_unclaimed_lease_is_renewed(own, clock):
    sync_version(own)
    clock.now += 10 * LEASE_SECONDS
    own.require("1")
    own.require_version(3)


def test_ownership_passes_to_later_process_of_same_run_only(own):
    sync_version(own, "2026-a")
    before = own.weight_epoch
    assert own.claim(ClaimRequest(run="mine", incarnation="2026-b"))
    assert own.version is None and own.weight_epoch != before
    with pytest.raises(RequestRefusedError, match="belongs to run 'mine'"):
        own.require("2026-a")
    with pytest.raises(RequestRefusedError, match="a later process of run 'mine' owns this server"):
        own.claim(ClaimRequest(run="mine", incarnation="2026-a"))
    own.require("2026-b")


def test_ownership_repeated_claim_has_no_effect(own):
    sync_version(own)
    before = own.weight_epoch
    assert not own.claim(ClaimRequest(run="mine", incarnation="1"))
    assert own.version == 3 and own.has_base and own.weight_epoch == before


def test_ownership_has_no_version_during_weight_update(own):
    sync_version(own)
    weight_epoch = own.begin_update(keeps_base=False)
    with pytest.raises(RequestRefusedError):
        own.require_version(3)
    assert not own.has_base
    own.end_update(weight_epoch, 4, is_base=False)  # merged weights
    own.require_version(4)
    with pytest.raises(RequestRefusedError, match="has version 4, but version 3 was requested"):
        own.require_version(3)
    assert not own.has_base


def test_ownership_failed_update_leaves_no_version_and_keeps_base(own):
    sync_version(own)
    own.begin_update(keeps_base=True)
    assert own.version is None and own.has_base
    own.begin_update(keeps_base=False)
    assert own.version is None and not own.has_base


def test_ownership_base_weights_without_adapter_have_no_version(own):
    own.claim(ClaimRequest(run="mine", incarnation="1"))
    own.end_update(own.begin_update(keeps_base=False), None, is_base=True)
    assert own.version is None and own.has_base
    own.end_update(own.begin_update(keeps_base=True), 7, is_base=True)
    assert own.version == 7 and own.has_base


@pytest.mark.parametrize("change", ["claim", "release", "push"])
def test_ownership_update_of_previous_owner_gives_no_version(own, change):
    sync_version(own)
    weight_epoch = own.begin_update(keeps_base=False)
    if change == "claim":
        own.claim(ClaimRequest(run="mine", incarnation="2"))
    elif change == "release":
        own.release("1")
    else:
        own.begin_update(keeps_base=False)
    with pytest.raises(RequestRefusedError, match="claimed again during the weight update"):
        own.end_update(weight_epoch, 4, is_base=True)
    assert own.version is None and not own.has_base


def test_ownership_released_server_accepts_first_claim_without_weights(own):
    sync_version(own)
    with pytest.raises(RequestRefusedError):
        own.release("2")
    own.release("1")
    assert own.owner is None and own.version is None
    assert own.claim(ClaimRequest(run="other", incarnation="0"))


def test_ownership_lease_is_extended_by_streams_of_current_owner(own, clock):
    sync_version(own)
    old = own.weight_epoch
    for _ in range(5):
        clock.now += LEASE_SECONDS - 1
        own.renew(old)
    assert own.owner == "mine"
    own.begin_update(keeps_base=False)
    clock.now += LEASE_SECONDS - 1
    own.renew(old)
    clock.now += 1
    assert own.owner is None
