"""Partial rollouts over weight syncs on real rollout servers: each token against transformers at its version, and loss of servers.

Four servers are started once. They are killed one after another, so the tests run in their order.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_grpo.plugins.servers import wire
from tests.distributed.test_rollout_servers import make_prompts, trainer, write_addresses
from tests.ranks import run_ranks
from tests.servers import ASKS, BackgroundCall, Server
from tests.tiny_models import write_tiny

SEED, LIMIT, GROUP = 5, 120, 3
VERSIONS, NUM_PROMPTS = 3, 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints of one architecture with different weights, one per version."""
    folder = tmp_path_factory.mktemp("models")
    return [write_tiny(folder / str(seed), tied=False, seed=seed, max_positions=512) for seed in range(VERSIONS)]


@pytest.fixture(scope="module")
def servers(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    started = [Server(folder / str(i), models[0], "--vllm_max_model_len", "256", "--vllm_max_num_seqs", "6") for i in range(4)]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.close()


def make_settings(**more):
    from megatron_grpo.core.rollout.engine import SamplingSettings

    return replace(SamplingSettings(n=GROUP, max_completion_length=LIMIT, temperature=0.8, stop_token_ids=(4,)), **more)


def push(policy, weight_sync, paths, version):
    from megatron_grpo.core.weights.hf_files import HfReader

    policy.exchange.load(policy.chunks, HfReader(paths[version]))
    assert weight_sync.sync_weights(version).logp_difference_max < 1e-4


@cache
def prepare_model(path):
    from tests.tiny_models import load_tiny

    return load_tiny(path)


def find_worst_gap(paths, prompt_ids, tokens, logprobs, parts, temperature=0.8):
    """Return the largest |sampled log-prob - transformers'| of a completion, at each token's version, in nats at temperature 1."""
    from tests.tiny_models import hf_logprobs

    worst = 0.0
    for version, begin, end in parts:
        expected = hf_logprobs(prepare_model(paths[version]), [*prompt_ids, *tokens], temperature).numpy()[len(prompt_ids) - 1 :]
        worst = max([worst, *(temperature * np.abs(expected[begin:end] - logprobs[begin:end]))])
    return worst


def sample_over_syncs(rank, world, paths, named, out, seconds):
    """Sync three times after random delays.

    Return prompt -> tokens, spans and text of this rank, the largest gap, and what each sync interrupted.
    """
    asked, found, left, kept = make_prompts(NUM_PROMPTS), {}, [], []
    rng, to_check = random.Random(seconds), []  # checked at the end: servers go on meanwhile
    with trainer(rank, world, paths[0], named, out) as (policy, engine, weight_sync):
        for version in range(VERSIONS):
            push(policy, weight_sync, paths, version)
            wanted = asked[3 * version : 3 * version + 3 if version + 1 < VERSIONS else NUM_PROMPTS]
            generation = engine.resume(asked[3 * version :], make_settings(), seed=SEED, partial=kept)
            groups = generation.groups(wanted[:1]) + generation.groups(wanted[1:])
            time.sleep(seconds * rng.random())  # as the trainer trains
            kept = [one for one in generation.interrupt() if one.prompt_number > wanted[-1].number]
            for group in groups:
                begin = len(group.prompt.token_ids)
                for place, one in enumerate(group.completions):
                    spans = [(by, first - begin, last - begin) for by, first, last in one.versions]
                    to_check.append((group.prompt.token_ids, one.answer_ids, one.logprobs[begin:], spans))
                    found[group.prompt.number, place] = (list(one.answer_ids), spans, one.text, one.finish_reason)
            to_check += [(asked[one.prompt_number].token_ids, one.token_ids, one.logprobs, one.parts) for one in kept]
            left.append([(one.key, one.versions, len(one.token_ids), one.finish_reason) for one in kept])
    return found, max(find_worst_gap(paths, *one) for one in to_check), left


@pytest.mark.parametrize(("world", "seconds"), [(1, 0.0), (2, 0.1)])
def test_server_partial_rollout_tokens_equal_their_version_at_random_syncs(models, servers, tmp_path, world, seconds):
    from transformers import AutoTokenizer

    named = write_addresses(tmp_path / "names", *servers[:2])
    for again in range(5):  # on a busy machine the servers may end everything before the first interruption
        parts = run_ranks(sample_over_syncs, world, models, named, tmp_path / f"out-{again}", seconds, env=ASKS, timeout=240)
        found = {key: one for part in parts for key, one in part[0].items()}
        if any(len(spans) > 1 for _, spans, _, _ in found.values()):
            break
    assert set(found) == {(number, place) for number in range(NUM_PROMPTS) for place in range(GROUP)}
    assert sum(len(part[0]) for part in parts) == len(found)  # each is on one rank
    assert max(part[1] for part in parts) < 1e-5
    assert [part[2] for part in parts][1:] == [[[], [], []]] * (world - 1)  # rank 0 has all that is unfinished
    for tokens, spans, _, reason in found.values():
        assert spans[0][1] == 0 and spans[-1][2] == len(tokens) <= LIMIT and (reason == "stop" or len(tokens) == LIMIT)
    assert all(count for rows in parts[0][2] for _, _, count, _ in rows)
    assert any(len(spans) > 1 for _, spans, _, _ in found.values())
    assert all(version <= number // 3 for (number, _), (_, spans, _, _) in found.items() for version, *_ in spans)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    for tokens, _, text, reason in found.values():
        whole = tokenizer.decode(tokens[:-1] if reason == "stop" else tokens, skip_special_tokens=True)
        assert text.strip() == whole.strip()


def interrupt_and_kill(rank, world, paths, named, out, moment, pids):
    """Kill a server at a point of a sync; return what the others sample then."""
    asked = make_prompts(NUM_PROMPTS)
    with trainer(rank, world, paths[0], named, out) as (policy, engine, weight_sync):
        push(policy, weight_sync, paths, 0)
        generation = engine.resume(asked, make_settings(), seed=SEED, partial=[])
        groups = generation.groups(asked[:1])
        kept = generation.interrupt()
        before = {one.key: len(one.token_ids) for one in kept}
        if moment == "between interruption and push":
            kill(pids)
        take = engine.load_weights

        def taken(update):
            if moment == "in the push":
                kill(pids)
            take(update)

        engine.load_weights = taken
        push(policy, weight_sync, paths, 1)
        generation = engine.resume(asked, make_settings(), seed=SEED, partial=kept)
        if moment == "after the push":
            kill(pids)
        groups += generation.groups(asked[1:])
        found = generation.interrupt()
        worst = max(find_worst_gap(paths, asked[one.prompt_number].token_ids, one.token_ids, one.logprobs, one.parts) for one in found)
        return [group.prompt.number for group in groups], worst, before, {one.key: (len(one.token_ids), one.versions) for one in found}


def kill(pids):
    while pids:
        os.killpg(pids.pop(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["between interruption and push", "in the push", "after the push"])
def test_server_killed_during_a_sync_loses_at_most_its_tokens_since_then(models, servers, tmp_path, moment):
    place = ["between interruption and push", "in the push", "after the push"].index(moment)
    doomed, last = servers[1 + place], servers[0]
    named = write_addresses(tmp_path / "names", last, doomed)
    [(numbers, worst, before, found)] = run_ranks(
        interrupt_and_kill, 1, models, named, tmp_path / "out", moment, [doomed.process.pid], env=ASKS, timeout=240
    )
    assert numbers == list(range(NUM_PROMPTS)) and worst < 1e-5
    assert len(found) == NUM_PROMPTS * GROUP
    for key, count in before.items():  # what rank 0 had is not sampled again
        assert found[key][0] >= count and found[key][1][0] == 0
    assert any(1 in versions for _, versions in found.values())


def test_abort_returns_partial_completions_and_server_continues(models, servers, tmp_path):
    server = servers[0]
    named = write_addresses(tmp_path / "names", server)
    run_ranks(hold, 1, models, named, tmp_path / "out", server.address_file.parent / "claimed", env=ASKS, timeout=240)


def hold(rank, world, paths, named, out, file):
    """Return the answers to requests of several completions and of one, some of which have ended when POST /abort arrives."""
    from megatron_grpo.plugins.servers.http import start_coroutine

    with trainer(rank, world, paths[0], named, out) as (policy, engine, weight_sync):
        push(policy, weight_sync, paths, 0)
        [member] = engine._broadcaster.server_group.used
        asked = make_prompts(4)
        requests = [
            wire.Request(key=str(i), ids=one.token_ids, seed=i, n=4, max_tokens=[2, 200, 200, 200][i]) for i, one in enumerate(asked)
        ]
        lines = []
        body = wire.GenerateRequest(version=0, sampling=wire.Sampling(), requests=tuple(requests))
        stream = start_coroutine(member.server.stream("/generate", body, lines.append))
        while not any(line.strip() for line in lines):
            time.sleep(0.01)  # between two looks
        wrong = start_coroutine(member.server.call("POST", "/abort", wire.AbortRequest(version=7), timeout=30.0))
        with pytest.raises(Exception, match="this server has version 0, but version 7 was requested"):
            wrong.result()
        state = wire.decode(
            wire.ServerState, start_coroutine(member.server.call("POST", "/abort", wire.AbortRequest(version=0), timeout=30.0)).result()
        )
        assert state.running == 0 and state.version == 0
        stream.result()
        answers = {answer.key: answer for line in lines if (answer := wire.decode_line(wire.GenerateLine, line)) is not None}
        assert set(answers) == set("0123")
        for i, prompt in enumerate(asked):
            assert len(answers[str(i)].completions) == 4
            for one in answers[str(i)].completions:
                assert one.reason == ("length" if i == 0 else "abort") or one.reason == "stop"
                assert len(one.tokens) == len(one.logprobs)
                parts = [(0, 0, len(one.tokens))]
                assert find_worst_gap(paths, prompt.token_ids, one.tokens.tolist(), one.logprobs, parts, temperature=1.0) < 1e-5
        assert any(one.reason == "abort" and len(one.tokens) for answer in answers.values() for one in answer.completions)
        # The same completion in two parts has one text.
        first = max((one for one in answers["1"].completions if one.reason == "abort"), key=lambda one: len(one.tokens))
        begun = first.tokens.tolist()
        rest = wire.Request(key="r", ids=(*asked[1].token_ids, *begun), seed=1, n=1, max_tokens=8, num_sampled=len(begun))
        lines.clear()
        start_coroutine(member.server.stream("/generate", replace_requests(body, rest), lines.append)).result()
        [answer] = [answer for line in lines if (answer := wire.decode_line(wire.GenerateLine, line)) is not None]
        [second] = answer.completions
        assert second.text.startswith(first.text.rstrip("�"))
        # A stop string over both parts: last tokens of the first part, first one of the second. Special tokens are not in a text.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(paths[0])
        text_tokens = [token for token in begun if token not in tokenizer.all_special_ids]
        end = next(i for i, token in enumerate(second.tokens.tolist()) if token not in tokenizer.all_special_ids)
        over = tokenizer.decode([*text_tokens[-3:], second.tokens[end]])
        lines.clear()
        stops = wire.GenerateRequest(version=0, sampling=wire.Sampling(stop=(over,)), requests=(rest,))
        start_coroutine(member.server.stream("/generate", stops, lines.append)).result()
        [answer] = [answer for line in lines if (answer := wire.decode_line(wire.GenerateLine, line)) is not None]
        [stopped] = answer.completions
        assert stopped.reason == "stop" and stopped.tokens.tolist() == second.tokens.tolist()[: end + 1]
        assert stopped.text.strip() == tokenizer.decode(text_tokens[:-3]).strip()


def replace_requests(body, *requests):
    return wire.GenerateRequest(version=body.version, sampling=body.sampling, requests=requests)


def test_returning_server_continues_kept_completions_after_loss_of_all(models, servers, tmp_path):
    server = servers[0]
    named = write_addresses(tmp_path / "names", server)
    [(versions, worst)] = run_ranks(lose_all, 1, models, named, tmp_path / "out", server.process.pid, env=ASKS, timeout=240)
    assert worst < 1e-5 and versions


def lose_all(rank, world, paths, named, out, pid):
    """Stop the only server for longer than the stream timeout, then continue it: it loses its weights and is synced again."""
    from megatron_grpo.core.rollout.engine import WeightsLostError
    from megatron_grpo.plugins.servers import http

    http.SILENCE = 2.0
    asked = make_prompts(4)
    with trainer(rank, world, paths[0], named, out) as (policy, engine, weight_sync):
        push(policy, weight_sync, paths, 0)
        kept = []
        while not kept:  # something must be unfinished
            generation = engine.resume(asked, make_settings(), seed=SEED, partial=[])
            generation.groups(asked[:1])
            kept = [one for one in generation.interrupt() if not one.finish_reason]
        before = {one.key: len(one.token_ids) for one in kept}
        push(policy, weight_sync, paths, 1)
        generation = engine.resume(asked, make_settings(), seed=SEED, partial=kept)
        os.killpg(pid, signal.SIGSTOP)
        lost = BackgroundCall(lambda: generation.groups(asked))
        time.sleep(4.0)  # longer than a silence
        os.killpg(pid, signal.SIGCONT)
        with pytest.raises(WeightsLostError, match="completions are not sampled"):
            lost.answer()
        assert engine.version < 0
        push(policy, weight_sync, paths, 1)
        assert [group.prompt.number for group in generation.groups(asked)] == [0, 1, 2, 3]
        found = generation.interrupt()
        assert all(len(one.token_ids) >= before.get(one.key, 0) for one in found)
        worst = max(find_worst_gap(paths, asked[one.prompt_number].token_ids, one.token_ids, one.logprobs, one.parts) for one in found)
        return [one.versions for one in found], worst
