"""Rendezvous of ranks: the missing ranks are named."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_grpo.core.base.errors import ConfigError, RunError
from megatron_grpo.core.base.launcher import LaunchInfo
from megatron_grpo.core.parallel.state import check_gpu_not_shared, choose_gpu, rendezvous, report_failure
from megatron_grpo.plugins.servers.weight_transfer import _share_a_gpu


def make_launch_info(rank: int, port: int, world_size: int = 2) -> LaunchInfo:
    return LaunchInfo(rank=rank, world_size=world_size, local_rank=rank, is_launched=True, port=port)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rendezvous_names_missing_rank_and_raises_after_timeout(port):
    said = []
    with pytest.raises(RunError, match=r"waiting for 2 of 3 ranks .* timed out after 0\.01 minutes \(distributed_timeout_minutes\)"):
        rendezvous(make_launch_info(0, port, 3), timeout=timedelta(minutes=0.01), interval=0.2, print_line=said.append)
    assert f"waiting for 2 of 3 ranks at 127.0.0.1:{port} (ranks 1, 2)" in said


def test_rendezvous_without_rank_0_raises_on_other_ranks(port):
    said = []
    with pytest.raises(RunError, match="No response from rank 0"):
        rendezvous(make_launch_info(1, port), timeout=timedelta(seconds=0.5), interval=0.2, print_line=said.append)
    assert set(said) == {f"waiting for 1 of 2 ranks at 127.0.0.1:{port} (rank 0): Connection refused"}


def test_rendezvous_waits_for_late_rank(port):
    missed, stores = threading.Event(), []

    def late():
        missed.wait(60)
        stores.append(rendezvous(make_launch_info(1, port), timeout=timedelta(seconds=60), interval=0.2, print_line=lambda text: None))

    thread = threading.Thread(target=late)
    thread.start()
    first = rendezvous(make_launch_info(0, port), timeout=timedelta(seconds=60), interval=0.2, print_line=lambda text: missed.set())
    thread.join()
    stores[0].set("key", "value")
    assert missed.is_set() and first.get("key") == b"value"


@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("launcher_holds_store", [True, False])
def test_rendezvous_error_of_one_rank_is_raised_on_waiting_ranks(port, monkeypatch, refused, launcher_holds_store):
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if launcher_holds_store else None
    told = []

    def waits():
        joined = dataclasses.replace(make_launch_info(1 - refused, port), launcher_holds_store=launcher_holds_store)
        try:
            rendezvous(joined, timeout=timedelta(seconds=30), interval=0.2, print_line=lambda text: None)
        except ConfigError as error:
            told.append(str(error))

    thread = threading.Thread(target=waits)
    thread.start()
    own = {"RANK": str(refused), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**own, "TORCHELASTIC_USE_AGENT_STORE": str(launcher_holds_store)}.items():
        monkeypatch.setenv(name, value)
    report_failure(ConfigError("dataset (data.jsonl) does not exist."))
    thread.join()
    assert told == [f"rank {refused} on {socket.gethostname()} was rejected: dataset (data.jsonl) does not exist."]
    del agent


def test_rendezvous_on_used_port_raises_config_error(port):
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ConfigError, match=f"cannot open port {port} .* Use another MASTER_PORT"):
            rendezvous(make_launch_info(0, port), timeout=timedelta(seconds=5), interval=0.2)


def test_rendezvous_of_restarted_job_ignores_earlier_attempt_in_store(port):
    """A launcher that starts ranks again keeps its store. Three ranks, then two, then three again, and the first is
    always the last to come."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def rank(number, world_size, found):
        time.sleep(0.3 * (number == 0))
        joined = dataclasses.replace(make_launch_info(number, port, world_size), launcher_holds_store=True)
        met = rendezvous(joined, timeout=timedelta(seconds=60), interval=0.2, print_line=lambda text: None)
        if number == 0:
            met.set("address", f"of attempt {len(attempts)}")
        found[number] = met.get("address").decode()

    attempts = []
    for world_size in (3, 2, 3):
        found, threads = {}, []
        for number in range(world_size):
            threads.append(threading.Thread(target=rank, args=(number, world_size, found)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert found == dict.fromkeys(range(world_size), f"of attempt {len(attempts)}")
        attempts.append(found)
    del store


@pytest.mark.parametrize(("local_rank", "visible", "number"), [(0, 8, 0), (5, 8, 5), (5, 1, 0), (0, 1, 0)])
def test_choose_gpu_with_all_or_one_visible_device(local_rank, visible, number):
    assert choose_gpu(LaunchInfo(rank=local_rank, local_rank=local_rank, world_size=8), visible) == number


def test_choose_gpu_without_own_device_is_rejected():
    with pytest.raises(ConfigError, match="rank 3 has LOCAL_RANK 3 and sees 2 GPUs"):
        choose_gpu(LaunchInfo(rank=3, local_rank=3, world_size=4), 2)
    store = dist.HashStore()
    check_gpu_not_shared(store, LaunchInfo(rank=0, world_size=3), "GPU-a")
    check_gpu_not_shared(store, LaunchInfo(rank=1, world_size=3), "GPU-b")
    with pytest.raises(ConfigError, match="rank 2 would share GPU GPU-a with another rank"):
        check_gpu_not_shared(store, LaunchInfo(rank=2, world_size=3), "GPU-a")


def test_link_members_sharing_a_gpu_all_get_the_result():
    for gpus in (["a", "b", "a"], ["a", "b", "c"]):
        store, found = dist.HashStore(), []

        def ask(rank, store=store, found=found, gpus=gpus):
            found.append(_share_a_gpu(store, rank, 3, timedelta(seconds=20), gpus[rank]))

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert found == [len(set(gpus)) < 3] * 3
