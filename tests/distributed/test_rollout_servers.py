"""A trainer of several ranks with real rollout servers: tokens equal to colocated vLLM's, and each way in which servers are lost.

Three servers are started once. They are killed one after another, so the tests run in their order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.distributed.test_rollout import build_engine, read_tokens
from tests.ranks import run_ranks
from tests.servers import ASKS, Server
from tests.tiny_models import write_tiny

SEED = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints of one architecture with different weights; servers and runs start with the first."""
    folder = tmp_path_factory.mktemp("models")
    return [write_tiny(folder / str(seed), tied=False, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def servers(models, tmp_path_factory):
    """Three servers, which accept adapters."""
    folder = tmp_path_factory.mktemp("servers")
    started = [Server(folder / str(i), models[0], "--tuner_type", "lora", "--lora_rank", "8") for i in range(3)]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.close()


def write_addresses(folder: Path, *servers: Server) -> str:
    """Return a directory with the servers' address files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, server in enumerate(servers):
        shutil.copy(server.address_file, folder / str(number))
    return f"@{folder}"


def make_prompts(count):
    from megatron_grpo.core.types import Prompt

    return [Prompt(number=i, row=100 + i, raw="", token_ids=tuple(4 + (5 * i + j) % 120 for j in range(5 + i % 7)), columns={})
            for i in range(count)]  # fmt: skip


def make_sampling(n=3, length=16):
    from megatron_grpo.core.rollout.engine import SamplingSettings

    return SamplingSettings(n=n, max_completion_length=length, temperature=0.8)


def cut(**how):
    """Return sampling settings with top_k, top_p and min_p; each token has a sampling mask."""
    return dataclasses.replace(make_sampling(**how), top_k=12, top_p=0.9, min_p=0.01, returns_sampling_mask=True)


def make_grammar_sampling():
    """Return sampling settings with a grammar, which is sent over HTTP and limits the sampling mask."""
    return dataclasses.replace(cut(), more={"structured_outputs": {"regex": "1[0-9]{3,30}"}})


def describe_completion(groups):
    """Return the tokens and their sampling masks."""
    kept = [
        [one.sequence.sampling_mask and [part.tolist() for part in one.sequence.sampling_mask] for one in group.completions]
        for group in groups
    ]
    return list(zip(read_tokens(groups), kept, strict=True))


@contextlib.contextmanager
def trainer(rank, world, path, named, out, *, timeout=60.0, parallel=None, **changes) -> Iterator:
    """Yield (policy, engine, publisher) of one rank, like `build`. Pass `parallel` of the first one in this process."""
    from megatron_grpo.core.weights.shape import ModelShape
    from megatron_grpo.plugins.servers.servers import build_servers
    from megatron_grpo.run.adapters import lora_sync
    from megatron_grpo.run.assemble.run import build_weight_sync
    from tests.parity_cases import build, settings

    out.mkdir(exist_ok=True)
    cfg = settings(
        vllm_mode="server", vllm_server_host=[named], vllm_server_timeout=timeout, weight_sync_bucket_mb=1, output_dir=str(out), **changes
    )
    policy, shape = build(path, cfg, world, parallel), ModelShape.from_pretrained(path)
    lora = lora_sync(cfg, shape, on_gpu=False)
    if lora is not None:
        policy.adapters.adapter_sync = lora.kind
    inputs = SimpleNamespace(model_path=Path(path), shape=shape, longest_prompt=20, image_spec=None, max_images=0)
    engine = build_servers(cfg, inputs, policy.parallel, bitwise_parity=lambda: None, lora=lora)
    try:
        yield policy, engine, build_weight_sync(cfg, policy, engine)
    finally:
        engine.close()


def find_worst_gap(groups, path, temperature):
    """Return the largest |sampled log-prob - transformers'| of this rank's tokens."""
    from tests.tiny_models import hf_logprobs, load_tiny

    model, worst = load_tiny(path), 0.0
    for completion in (one for group in groups for one in group.completions):
        expected = hf_logprobs(model, completion.sequence.token_ids.tolist(), temperature).numpy()
        worst = max(worst, float(np.abs(expected - completion.logprobs[1:])[completion.sequence.mask[1:]].max()))
    return worst


def by_number(parts):
    """Return the tokens of all groups of all ranks by prompt number; each group is on one rank."""
    found = {number: tokens for part in parts for number, tokens in part.items()}
    assert len(found) == sum(map(len, parts))
    return found


# ---- as if vLLM were inside the ranks ------------------------------------------------------------------------------------------------


def sample_versions(rank, world, paths, named, out, layout):
    """Sync three other weights, and return what is sampled after each."""
    from megatron_grpo.core.weights.hf_files import HfReader

    found = []
    with trainer(rank, world, paths[0], named, out, **layout) as (policy, engine, weight_sync):
        policy.exchange.bucket_bytes = 8 << 10  # most tensors travel in slices
        for version, path in enumerate(paths):
            policy.exchange.load(policy.chunks, HfReader(path))
            stats = weight_sync.sync_weights(version)
            assert stats.logp_difference_max < 1e-4 and engine.version == version and engine.has_base
            assert weight_sync.sync_weights(version) is None
            assert stats.num_tensors == (len(HfReader(path).names) if rank == 0 else 0)
            groups = engine.generate(make_prompts(9), make_sampling(), seed=SEED)
            assert find_worst_gap(groups, path, 0.8) < 1e-4
            assert [group.prompt.number for group in groups] == list(range(9))[rank::world]
            further = engine.generate(make_prompts(12)[9:], make_grammar_sampling(), seed=SEED)  # as a round of dynamic sampling
            greedy = engine.generate(make_prompts(3), make_sampling().greedy(), seed=0)
            found.append(
                [dict(zip((g.prompt.number for g in part), describe_completion(part), strict=True)) for part in (groups, further, greedy)]
            )
        assert engine.generate([], make_sampling(), seed=SEED) == []
    return found


def sample_inside(rank, world, path):
    with build_engine(path, rank, world) as engine:
        asked = (
            (make_prompts(9), make_sampling(), SEED),
            (make_prompts(12)[9:], make_grammar_sampling(), SEED),
            (make_prompts(3), make_sampling().greedy(), 0),
        )
        return [dict(enumerate(describe_completion(engine.generate(some, how, seed=seed)), some[0].number)) for some, how, seed in asked]


TP2, PP2 = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2)


def test_servers_and_colocated_engine_sample_equal_tokens(models, servers, tmp_path):
    inside = [[by_number([part]) for part in run_ranks(sample_inside, 1, path)[0]] for path in models]
    for number, (layout, used) in enumerate([(TP2, servers[:1]), (PP2, servers[:2])]):
        named = write_addresses(tmp_path / "names", *used)
        ranks = run_ranks(sample_versions, 2, models, named, tmp_path / str(number), layout, env=ASKS, timeout=180)
        for version, right in enumerate(inside):
            assert [by_number([rank[version][part] for rank in ranks]) for part in range(3)] == right


def push_adapters(rank, world, path, named, out, alone):
    """Sync a trial adapter, a large adapter, and the trial again; each is verified and changes what is sampled."""
    changes = dict(tuner_type="lora", lora_rank=8, vllm_enable_lora=alone)
    with trainer(rank, world, path, named, out, **TP2, **changes) as (policy, engine, weight_sync):
        first = weight_sync.sync_weights(0)
        assert first.logp_difference_max < 1e-4 and engine.version == 0 and engine.has_base == alone
        assert (
            find_worst_gap(engine.generate(make_prompts(4), make_sampling(), seed=SEED), path, 0.8) < 1e-4
        )  # a new adapter changes nothing
        kept = policy.adapters.randomize(seed=3)
        moved = weight_sync.sync_weights(1)
        assert moved.logp_difference_max < 1e-4
        assert find_worst_gap(engine.generate(make_prompts(4), make_sampling(), seed=SEED), path, 0.8) > 0.1
        policy.adapters.restore(kept)
        assert weight_sync.sync_weights(2).logp_difference_max < 1e-4
    return moved.num_tensors


def test_server_adapter_sync_alone_and_merged_is_verified(models, servers, tmp_path):
    named = write_addresses(tmp_path / "names", *servers[:2])
    alone, merged = (
        run_ranks(push_adapters, 2, models[0], named, tmp_path / str(way), way, env=ASKS, timeout=180)[0] for way in (True, False)
    )
    assert alone == 2 * 7 * 2 and merged > 20  # A and B of seven modules in two layers; all weights


# ---- episodes ------------------------------------------------------------------------------------------------------------------------

# Of the words of tiny models: `<bos>` opens a turn and `<eos>` ends it; every third word ends one too, so that turns are short.
CHAT = "{% for m in messages %}<bos> {{ m['content'] }} <eos> {% endfor %}{% if add_generation_prompt %}<bos> {% endif %}"
ENDS = tuple(range(4, 128, 3))


def make_episode_sampler(engine):
    """Return a sampler of episodes on this engine; its environment answers with the turn's number."""
    from megatron_grpo.plugins.environments.episode_runner import EpisodeRunnerFactory, EpisodeSampler
    from megatron_grpo.plugins.environments.protocol import Environment
    from megatron_grpo.plugins.environments.trajectory import ChatTemplate
    from tests.tiny_models import word_tokenizer

    class Counts(Environment):
        async def step(self, turn):
            return [{"role": "user", "content": str(10 + turn.number)}], 1.0, False

    tokenizer = word_tokenizer(128)
    tokenizer.chat_template = CHAT
    limits = dict(max_turns=3, max_completion_length=40, max_model_len=60, timeout=10.0, concurrency=8)
    return EpisodeSampler(
        engine, EpisodeRunnerFactory(environment=Counts, template=ChatTemplate(tokenizer, end_ids=[2, *ENDS]), system=None, **limits)
    )


def make_agent_sampler(engine):
    """Return a sampler of agents on this engine: several contexts, with two requests in parallel."""
    from megatron_grpo.plugins.environments.agents import AgentSampler
    from megatron_grpo.plugins.environments.trajectory import ChatTemplate
    from tests.agents import branching, stage
    from tests.tiny_models import word_tokenizer

    tokenizer = word_tokenizer(128)
    tokenizer.chat_template = CHAT
    return AgentSampler(engine, stage(branching, template=ChatTemplate(tokenizer, end_ids=[2, *ENDS]), max_model_len=100, concurrency=32))


def make_agent_prompts(count):
    from megatron_grpo.core.types import Prompt

    raws = [[{"role": "user", "content": f"{20 + i} {30 + i}"}] for i in range(count)]
    return [Prompt(number=i, row=i, raw=raw, token_ids=(1, 20 + i, 30 + i, 2, 1), columns={}) for i, raw in enumerate(raws)]


def read_episodes(groups):
    return {
        group.prompt.number: [
            (
                one.sequence.token_ids.tolist(),
                one.sequence.mask.tolist(),
                one.sequence.starts,
                one.sequence.mask_ids.tolist(),
                one.finish_reason,
            )
            for one in group.completions
        ]
        for group in groups
    }


def play_inside(rank, world, path, player, told):
    how = dataclasses.replace(cut(n=4, length=40), stop_token_ids=ENDS)
    with build_engine(path, rank, world) as engine:
        return told(player(engine).generate(make_agent_prompts(8), how, seed=SEED))


def play_and_lose(rank, world, path, named, out, player, told):
    """Return the same episodes on all servers; with a server whose connection breaks in mid-episode; and with all again."""
    from megatron_grpo.plugins.servers.http import ServerGoneError
    from tests.unit.trainer.test_rollouts import build_generator

    found = []
    with trainer(rank, world, path, named, out) as (policy, engine, weight_sync):
        for version, num_lost in enumerate((0, 1, 2)):
            weight_sync.sync_weights(version)
            losses = []
            if rank == 0:
                for member in engine._broadcaster.server_group.used[:num_lost]:
                    break_after(member, 5, ServerGoneError, losses)
            how = dataclasses.replace(cut(n=4, length=40), stop_token_ids=ENDS)
            sampler = build_generator(player(engine), sync_again=lambda version=version: weight_sync.sync_weights(version))
            groups = sampler.generate(make_agent_prompts(8), how, seed=SEED)
            assert find_worst_context_gap(groups, path) < 1e-4 and (rank or len(losses) == num_lost)
            assert {one.versions[0][0] for group in groups for one in group.completions} == {version}
            found.append(told(groups))
    return found


def break_after(member, lines, gone, losses):
    """Break the connection to a server once, after this many answer lines."""
    real, left = member.server.stream, [lines]

    async def breaking(path, body, take):
        def taken(line):
            if left and line.strip():
                left[0] -= 1
                if left[0] < 0:
                    left.clear()
                    losses.append(member)
                    raise gone("it went in the middle")
            take(line)

        await real(path, body, taken)

    member.server.stream = breaking


def find_worst_context_gap(groups, path):
    import torch

    from tests.parity_cases import mask_logits
    from tests.tiny_models import load_tiny

    model, worst = load_tiny(path), 0.0
    for one in (one for group in groups for one in group.completions):
        ids, at = torch.from_numpy(one.sequence.token_ids), np.flatnonzero(one.sequence.mask)
        with torch.no_grad():
            logits = torch.cat([model(ids[None, begin:end]).logits[0] for begin, end in one.sequence.contexts]) / 0.8
        expected = mask_logits(logits[at - 1], one.sequence, at).log_softmax(-1).gather(1, ids[at, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - one.logprobs[at]).max(initial=0.0)))
    return worst


@pytest.mark.parametrize("what", ["episodes", "agents"])
def test_server_episodes_equal_colocated_and_lost_server_repeats_only_open_turns(models, servers, tmp_path, what):
    from tests.agents import list_turns

    how = (make_episode_sampler, read_episodes) if what == "episodes" else (make_agent_sampler, list_turns)
    [inside] = run_ranks(play_inside, 1, models[0], *how, timeout=120)
    if what == "episodes":
        assert {finish_reason for group in inside.values() for *_, finish_reason in group} >= {"max_turns"}
    else:
        assert {len(turns) for rows in inside.values() for turns in rows} == {5}
    named = write_addresses(tmp_path / "names", *servers[:2])
    first, second = run_ranks(play_and_lose, 2, models[0], named, tmp_path / "run", *how, env=ASKS, timeout=180)
    for ours, theirs in zip(first, second, strict=True):
        assert sorted(ours) == [0, 2, 4, 6] and by_number([ours, theirs]) == inside


# ---- a whole runs ------------------------------------------------------------------------------------------------------------------------

RUN = ["--max_steps", "6", "--save_steps", "100", "--dynamic_sample", "true", "--steps_per_generation", "2", "--seed", "3",
       "--eval_steps", "4", "--eval_num_prompts", "6", "--tensor_model_parallel_size", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(models, tmp_path_factory):
    """The flags of model, data and rewards; the data is also the held-out set."""
    from tests.end_to_end.runs import write_inputs

    folder = tmp_path_factory.mktemp("inputs")
    flags = write_inputs(folder)
    flags[flags.index("--model") + 1] = str(models[0])
    del flags[flags.index("--vllm_kv_cache_memory_mb") :]
    return [*flags, *RUN, "--eval_dataset", str(folder / "data.jsonl")]


def run_training(rank, world, flags):
    """Run the command; return its exit code. A frozen server times out soon; with servers the ranks have no vLLM."""
    import sys

    from megatron_grpo.cli import main
    from megatron_grpo.plugins.servers import http, weight_broadcast

    if "server" in flags:
        sys.modules["vllm"] = None
    http.SILENCE, weight_broadcast.LINK_SECONDS = 3.0, 5.0
    return main(["train", *flags])


def read_outcome(out: Path):
    """Return what was sampled, the metrics without times, and the final weights."""
    import pyarrow.parquet as pq
    from safetensors.numpy import load_file

    from tests.end_to_end.runs import read_jsonl

    completions = [row for file in sorted((out / "completions").iterdir()) for row in pq.read_table(file).to_pylist()]
    metrics = [
        {name: value for name, value in row.items() if not name.startswith("time/") and name != "tokens_per_second"}
        for row in read_jsonl(out / "metrics.jsonl")
    ]
    return completions, metrics, load_file(out / "hf" / "model.safetensors")


@pytest.fixture(scope="module")
def inside(inputs, tmp_path_factory):
    """Output of a complete run with colocated vLLM."""
    out = tmp_path_factory.mktemp("inside")
    assert run_ranks(run_training, 2, [*inputs, "--vllm_kv_cache_memory_mb", "32", "--output_dir", str(out)], timeout=180) == [0, 0]
    return read_outcome(out)


def assert_same_run(found, right):
    logprobs = [np.concatenate([row.pop("sampler_logprobs") for row in map(dict, rows[0])]) for rows in (found, right)]
    assert np.allclose(*logprobs, atol=1e-4, equal_nan=True)  # NaN where nothing was drawn
    found, right = ([[{**row, "sampler_logprobs": None} for row in rows[0]], *rows[1:]] for rows in (found, right))
    assert found[0] == right[0] and len(found[0]) > 40  # every token of every completion, with rewards and advantages
    for mine, theirs in zip(found[1], right[1], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert all(np.allclose(found[2][name], tensor, atol=1e-6) for name, tensor in right[2].items())


def test_run_on_servers_equals_colocated_run(inputs, inside, servers, tmp_path):
    named = write_addresses(tmp_path / "names", *servers[:2])
    flags = [*inputs, "--vllm_mode", "server", "--vllm_server_host", named, "--output_dir", str(tmp_path / "run")]
    assert run_ranks(run_training, 2, flags, env=ASKS, timeout=180) == [0, 0]
    assert_same_run(read_outcome(tmp_path / "run"), inside)


def push_wrong_tensors(rank, world, path, named, out):
    """Sync with a missing tensor and with a wrong one: the error names the tensor and the server, and the next sync succeeds."""
    from dataclasses import replace

    from megatron_grpo.core.trainer.weight_sync import WeightSyncError

    with trainer(rank, world, path, named, out) as (policy, engine, weight_sync):
        weight_sync.sync_weights(0)
        take, norm = engine.load_weights, "model.layers.1.input_layernorm.weight"

        def changed(change):
            engine.load_weights = lambda update: take(replace(update, tensors=change(update.tensors)))

        changed(lambda tensors: (pair for pair in tensors if pair[0] != norm))
        with pytest.raises(WeightSyncError, match=rf"The weight sync of version 1 failed: http://127.0.0.1:\d+: .*{norm}.*; http://"):
            weight_sync.sync_weights(1)
        changed(lambda tensors: ((name, tensor * 2 if name == norm else tensor) for name, tensor in tensors))
        with pytest.raises(WeightSyncError, match=r"\n  http://127.0.0.1:\d+: max .*\n  http://.*\n  All engines differ"):
            weight_sync.sync_weights(2)
        engine.load_weights = take
        assert weight_sync.sync_weights(3).logp_difference_max < 1e-4


def test_server_sync_error_names_tensor_and_server(models, servers, tmp_path):
    run_ranks(push_wrong_tensors, 1, models[0], write_addresses(tmp_path / "names", *servers[:2]), tmp_path / "run", env=ASKS, timeout=120)


# ---- who comes and who goes ----------------------------------------------------------------------------------------------------------


def take_over(rank, world, path, named, out):
    """A second run is rejected by name; a later process of the same run takes over, and the earlier one ends."""
    from megatron_grpo.core.base.errors import ConfigError, RunError

    with trainer(rank, world, path, named, out) as (policy, engine, weight_sync):
        weight_sync.sync_weights(0)
        again = dict(parallel=policy.parallel)
        with pytest.raises(ConfigError, match="owns this server"), trainer(rank, world, path, named, out.with_name("other"), **again):
            raise AssertionError("two runs on one server")
        with trainer(rank, world, path, named, out, **again) as (_, second, its_publisher):
            its_publisher.sync_weights(0)
            with pytest.raises(RunError, match="Another process of this run has claimed"):
                weight_sync.sync_weights(1)
            assert second.generate(make_prompts(2), make_sampling(), seed=SEED)


def test_server_belongs_to_one_run_and_its_latest_process(models, servers, tmp_path):
    run_ranks(take_over, 1, models[0], write_addresses(tmp_path / "names", servers[0]), tmp_path / "run", env=ASKS, timeout=120)


def act_when_answered(rank, count, act):
    """Run an action on rank 0 once this many further prompts were answered; return their lines."""
    from megatron_grpo.plugins.servers import requests

    heard, decode = [], requests.wire.decode_line

    def listen(cls, line):
        answer = decode(cls, line)
        if answer is not None:
            heard.append(answer)
            if len(heard) == count:
                act()
        return answer

    if rank == 0:
        requests.wire.decode_line = listen
    return heard


def freeze_server(rank, world, path, named, out, pid):
    """Stop a server during a rollout and continue it: it is used again after the next sync."""
    from megatron_grpo.plugins.servers import http, server_group

    http.SILENCE, server_group.SECONDS_BETWEEN_SIGNS = 4.0, 0.5
    with trainer(rank, world, path, named, out) as (policy, engine, weight_sync):
        weight_sync.sync_weights(0)
        act_when_answered(rank, 5, lambda: os.killpg(pid, signal.SIGSTOP))
        groups = engine.generate(make_prompts(60), make_sampling(4, 32), seed=SEED)
        assert rank or len(engine._broadcaster.server_group.used) == 1
        if rank == 0:
            os.killpg(pid, signal.SIGCONT)
            while any(member.is_silent for member in engine._broadcaster.server_group.members.values()):
                time.sleep(0.05)  # between two looks
        weight_sync.sync_weights(1)
        assert rank or len(engine._broadcaster.server_group.used) == 2
        assert engine.generate(make_prompts(4), make_sampling(), seed=SEED)
        return dict(zip((g.prompt.number for g in groups), read_tokens(groups), strict=True))


def ask_all(rank, world, path, named, out):
    with trainer(rank, world, path, named, out) as (_, engine, weight_sync):
        weight_sync.sync_weights(0)
        groups = engine.generate(make_prompts(60), make_sampling(4, 32), seed=SEED)
        return dict(zip((g.prompt.number for g in groups), read_tokens(groups), strict=True))


@pytest.fixture(scope="module")
def whole(models, servers, tmp_path_factory):
    """Answers to sixty prompts without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    return by_number(run_ranks(ask_all, 2, models[0], write_addresses(folder / "names", servers[0]), folder / "run", env=ASKS, timeout=120))


def test_frozen_server_loses_no_prompt_and_is_used_again(models, servers, tmp_path, whole):
    named = write_addresses(tmp_path / "names", *servers[:2])
    ranks = run_ranks(freeze_server, 2, models[0], named, tmp_path / "run", servers[1].process.pid, env=ASKS, timeout=180)
    assert by_number(ranks) == whole


def die_in_a_push(rank, world, path, named, out, pid):
    """Kill one of two servers after the third tensor: the other has all weights, and no server has a part."""
    from dataclasses import replace

    with trainer(rank, world, path, named, out) as (policy, engine, weight_sync):
        weight_sync.sync_weights(0)
        if rank == 0:
            take = engine.load_weights

            def killing(update):
                def tensors():
                    for number, pair in enumerate(update.tensors):
                        if number == 3:
                            with contextlib.suppress(ProcessLookupError):
                                os.killpg(pid, signal.SIGKILL)
                        yield pair

                take(replace(update, tensors=tensors()))

            engine.load_weights = killing
        stats = weight_sync.sync_weights(1)
        assert stats.logp_difference_max < 1e-4 and engine.version == 1
        groups = engine.generate(make_prompts(60), make_sampling(4, 32), seed=SEED)
        assert {group.version for group in groups} == {1}
        return dict(zip((g.prompt.number for g in groups), read_tokens(groups), strict=True))


def test_server_killed_in_a_sync_costs_only_that_sync(models, servers, tmp_path, whole):
    named = write_addresses(tmp_path / "names", *servers[:2])
    ranks = run_ranks(die_in_a_push, 2, models[0], named, tmp_path / "run", servers[1].process.pid, env=ASKS, timeout=180)
    assert by_number(ranks) == whole and servers[1].has_left_nothing()


def lose_all(rank, world, path, named, out, pid, address):
    """Kill the only server during a rollout; another one registers its address, and earlier answers are kept."""
    from tests.unit.trainer.test_rollouts import build_generator

    with trainer(rank, world, path, named, out) as (policy, engine, weight_sync):
        weight_sync.sync_weights(0)
        restoring = build_generator(engine, sync_again=lambda: weight_sync.sync_weights(0))

        def kill():
            os.killpg(pid, signal.SIGKILL)
            shutil.copy(address, Path(named.removeprefix("@")) / "another")

        heard = act_when_answered(rank, 10, kill)
        groups = restoring.generate(make_prompts(60), make_sampling(4, 32), seed=SEED)
        assert {group.version for group in groups} == {0} and engine.version == 0
        assert rank or sorted(int(answer.key) for answer in heard) == list(range(60))  # what was answered was not asked again
        return dict(zip((g.prompt.number for g in groups), read_tokens(groups), strict=True))


def test_new_server_continues_the_rollout_of_the_last_killed_server(models, servers, tmp_path, whole):
    named = write_addresses(tmp_path / "names", servers[0])
    ranks = run_ranks(
        lose_all, 2, models[0], named, tmp_path / "run", servers[0].process.pid, servers[2].address_file, env=ASKS, timeout=180
    )
    assert by_number(ranks) == whole and servers[0].has_left_nothing()


# ---- nothing comes back ----------------------------------------------------------------------------------------------------------------


def test_run_without_servers_is_saved_and_resumes_exactly(inputs, inside, servers, tmp_path):
    out, pid, metrics = tmp_path / "run", servers[2].process.pid, tmp_path / "run" / "metrics.jsonl"
    named = write_addresses(tmp_path / "names", servers[2])
    flags = [*inputs, "--vllm_mode", "server", "--vllm_server_host", named, "--output_dir", str(out)]

    def freeze_server():
        while not metrics.exists() or '"step": 3' not in metrics.read_text():
            time.sleep(0.01)
        os.killpg(pid, signal.SIGSTOP)

    threading.Thread(target=freeze_server, daemon=True).start()
    try:
        assert run_ranks(run_training, 2, [*flags, "--vllm_server_timeout", "2"], env=ASKS, timeout=180) == [3, 3]
    finally:
        os.killpg(pid, signal.SIGCONT)
    assert list((out / "checkpoints").iterdir()) and not (out / "hf").exists()
    assert run_ranks(run_training, 2, flags, env=ASKS, timeout=180) == [0, 0]
    assert_same_run(read_outcome(out), inside)


# ---- for tools/server_faults.py ----------------------------------------------------------------------------------------------------------

PROMPTS_OF_FAULTS = 60


def ask_rounds(rank, world, paths, named, out, folder):
    """Sync weights and sample until a file `stop` exists; write one line per round, and the first answers of each model."""
    import json
    from collections import Counter

    from megatron_grpo.core.parallel import collectives
    from megatron_grpo.core.weights.hf_files import HfReader
    from tests.unit.trainer.test_rollouts import build_generator

    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    with trainer(rank, world, paths[0], named, out, timeout=600.0) as (policy, engine, weight_sync):
        counts, number = Counter(), 0

        def restore():
            counts["restored"] += 1
            weight_sync.sync_weights(number)

        restoring = build_generator(engine, sync_again=restore)
        while not collectives.broadcast_object((folder / "stop").exists()):
            which, start = number % len(paths), time.monotonic()
            counts.clear()
            policy.exchange.load(policy.chunks, HfReader(paths[which]))
            weight_sync.sync_weights(number)
            groups = restoring.generate(make_prompts(PROMPTS_OF_FAULTS), make_sampling(4, 32), seed=SEED)
            assert {group.version for group in groups} <= {number}
            mine = dict(zip((group.prompt.number for group in groups), read_tokens(groups), strict=True))
            parts = collectives.all_gather_object([(number, tokens) for number, tokens in mine.items()])
            if rank == 0:
                all_of_them = [pair for part in parts for pair in part]
                found, known = dict(all_of_them), folder / f"answers_{which}.json"
                if not known.exists():
                    known.write_text(json.dumps(found))
                right = {int(key): [tuple(one) for one in tokens] for key, tokens in json.loads(known.read_text()).items()}
                line = {
                    "round": number, "lost": PROMPTS_OF_FAULTS - len(found), "twice": len(all_of_them) - len(found),
                    "wrong": sum(tokens != right[key] for key, tokens in found.items()), "seconds": time.monotonic() - start,
                    "restored": counts["restored"],
                }  # fmt: skip
                with (folder / "rounds.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            number += 1
