"""Rows from servers: rank 0 receives them, sends integers and flags to all ranks, and tokens only to ranks that score or train them."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from megatron_grpo.plugins.servers import wire
from tests.ranks import run_ranks
from tests.small_server import TOKEN, SmallServer
from tests.tiny_models import write_tiny

N = 4  # completions of a prompt


@contextlib.contextmanager
def count_received():
    """Count the bytes that this rank receives in exchanges and in objects for all ranks. gather_object pads to the longest part."""
    found, kept = Counter(), {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_object", "broadcast_object_list")}

    def exchange(output, *args, **kwargs):
        found["exchanged"] += output.nbytes
        return kept["all_to_all_single"](output, *args, **kwargs)

    def gather(values, value, group=None):
        kept["all_gather_object"](values, value, group=group)
        found["told"] += len(values) * max(len(pickle.dumps(one)) for one in values)

    def broadcast(box, src=None, group=None):
        kept["broadcast_object_list"](box, src=src, group=group)
        found["told"] += len(pickle.dumps(box[0])) if dist.get_rank() != src else 0

    for name, function in (("all_to_all_single", exchange), ("all_gather_object", gather), ("broadcast_object_list", broadcast)):
        setattr(dist, name, function)
    try:
        yield found
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def make_long_answers(length, server, body):
    for request in body.requests:
        rng = np.random.default_rng(request.seed)
        drawn = [
            wire.SampledCompletion(tokens=rng.integers(4, 128, length, np.int32), logprobs=-rng.random(length, np.float32),
                       text="x" * 8, reason="length", versions=((1, 0, length),))
            for _ in range(request.n)
        ]  # fmt: skip
        yield wire.encode_line(wire.GenerateLine(key=request.key, completions=tuple(drawn)))


def deliver_answers(rank, world, path, groups, length):
    """Return (bytes to the scoring ranks, bytes to the training ranks, rows of this rank with the tokens that they should have)."""
    from transformers import AutoTokenizer

    from megatron_grpo.core.parallel.layout import Layout
    from megatron_grpo.core.parallel.state import start
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.trainer.sample_buffer import send_to_dp_ranks
    from megatron_grpo.core.types import Prompt
    from megatron_grpo.plugins.servers.http import Server
    from megatron_grpo.plugins.servers.server_group import ServerRequirements, TrainingServerGroup
    from megatron_grpo.plugins.servers.servers import ServerEngine
    from megatron_grpo.plugins.servers.weight_broadcast import WeightBroadcaster

    parallel = start(Layout(world_size=world, tp=1, pp=1, vpp=None, cp=1, ep=1, etp=1))
    server = SmallServer(partial(make_long_answers, length), max_num_seqs=64, max_model_len=length + 8) if rank == 0 else None

    def pusher():
        server_group = TrainingServerGroup(lambda: [server.address], partial(Server, token=TOKEN, incarnation="1"),
        run="ours", incarnation="1",
                      requirements=ServerRequirements(max_model_len=length + 8), timeout=20.0)  # fmt: skip
        return WeightBroadcaster(server_group, device=parallel.device, bucket_bytes=1 << 20)

    engine = ServerEngine(pusher, tokenizer=AutoTokenizer.from_pretrained(path), vocab_size=128)
    if server is not None:
        server.took(1)
    engine.version = 1  # as after a push
    prompts = [Prompt(number=i, row=i, raw="", token_ids=(4, 5, 6, 7), columns={}) for i in range(groups)]
    with count_received() as to_judges:
        mine = engine.generate(prompts, SamplingSettings(n=N, max_completion_length=length), seed=1)
    rows = {(0, group.prompt.number * N + i): one for group in mine for i, one in enumerate(group.completions)}
    dp_ranks = {key: (key[1] // N + 1) % world for key in rows}  # every row is trained by another rank than judges it: the worst case
    with count_received() as to_trainers:
        held = send_to_dp_ranks(((dp_ranks[key], key, one) for key, one in rows.items()), parallel)
    engine.close()
    return dict(to_judges), dict(to_trainers), {key: one.sequence.token_ids[4:].tolist() for key, one in held.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_receive_only_tokens_that_they_score_or_train(tmp_path, world):
    groups, length = 16, 400
    ranks = run_ranks(deliver_answers, world, write_tiny(tmp_path, layers=1), groups, length)
    own = groups * N * length // world  # tokens of a rank
    for rank, (to_judges, to_trainers, held) in enumerate(ranks):
        assert to_judges["told"] < 1500 and "told" not in to_trainers
        # int32 and float32 on their way from rank 0, which sends itself nothing; then int64, float32 and a flag.
        assert to_judges["exchanged"] == pytest.approx(own * 8 * (rank > 0), rel=0.15, abs=100)
        assert to_trainers["exchanged"] == pytest.approx(own * 13, rel=0.15)
        assert {(key[1] // N + 1) % world for key in held} == {rank}
    all_rows = {key: tokens for *_, held in ranks for key, tokens in held.items()}
    assert sorted(all_rows) == [(0, row) for row in range(groups * N)]
    assert len({tuple(tokens) for tokens in all_rows.values()}) == groups * N
