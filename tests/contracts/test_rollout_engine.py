"""The protocols of `rollout.engine`, tested with each engine: scripted, colocated and rollout servers."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

ENGINES = ["scripted", "colocated"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), max_positions=512)


def build(name, model, rank, world_size, tensor_parallel_size=1):
    """Build an engine by name. Imported late, because the test process itself never loads vLLM."""
    if name == "scripted":
        from tests.end_to_end.scripted import make_answers
        from tests.scripted_engine import ScriptedEngine

        return ScriptedEngine(make_answers(model, 1.0))
    from megatron_grpo.core.rollout.colocated import ColocatedEngine
    from megatron_grpo.core.settings import RolloutConfig

    cfg = RolloutConfig(vllm_kv_cache_memory_mb=8, vllm_max_num_seqs=32, vllm_tensor_parallel_size=tensor_parallel_size)
    return ColocatedEngine.build(cfg, model_path=model, dtype="float32", max_model_len=128, seed=0, rank=rank, world_size=world_size)


def prompts(*numbers):
    from megatron_grpo.core.types import Prompt

    return [Prompt(number=i, row=i, raw="", token_ids=tuple(range(4 + i, 9 + 2 * i)), columns={}) for i in numbers]


def sampling(n=3):
    from megatron_grpo.core.rollout.engine import SamplingSettings

    return SamplingSettings(n=n, max_completion_length=8)


@pytest.mark.parametrize("name", ENGINES)
def test_generate_returns_whole_groups_in_prompt_order(model, name):
    def body(rank, world_size):
        engine = build(name, model, rank, world_size)
        assert engine.version == 0 and engine.dtype == "float32"
        asked = prompts(0, 1, 2, 3, 4)
        with engine.wake_up():
            groups = engine.generate(asked, sampling(), seed=1)
            # A refill of dynamic sampling asks again with the same weights; a single prompt leaves engines without work.
            further = engine.generate(prompts(5), sampling(), seed=1)
            assert engine.generate([], sampling(), seed=1) == []
            reversed_groups = engine.generate(asked[::-1], sampling(), seed=1)
            greedy = engine.generate(asked[:1], sampling().greedy(), seed=1)
        assert engine.version == 0
        by_number = {prompt.number: prompt for prompt in asked}
        for group in groups:
            assert group.prompt is by_number[group.prompt.number] and group.version == 0 and len(group.completions) == 3
            for completion in group.completions:
                opening, drawn = len(group.prompt.token_ids), completion.answer_ids
                assert tuple(completion.sequence.token_ids[:opening].tolist()) == group.prompt.token_ids
                assert 1 <= len(drawn) == completion.num_sampled <= 8 and completion.finish_reason in ("stop", "length")
                assert completion.versions == ((0, opening, opening + len(drawn)),)
                assert completion.logprobs.dtype == "float32" and (completion.logprobs[opening:] < 0).all()
                assert not completion.logprobs[:opening].any()
        return [
            {g.prompt.number: [c.answer_ids for c in g.completions] for g in some} for some in (groups, further, reversed_groups, greedy)
        ]

    first, second = run_ranks(body, 2)
    groups, further, reversed_groups, greedy = ({**one, **other} for one, other in zip(first, second, strict=True))
    assert [len(one) + len(other) for one, other in zip(first, second, strict=True)] == [5, 1, 5, 1]
    assert all(list(rank[0]) == sorted(rank[0]) and list(rank[2]) == sorted(rank[2], reverse=True) for rank in (first, second))
    assert first[0] and second[0] and groups.keys() == set(range(5)) and reversed_groups == groups
    assert len({ids for some in (groups, further) for group in some.values() for ids in group}) == 18
    assert [len(group) for group in greedy.values()] == [1]


def test_background_generation_equals_generate_at_its_start(model):
    """For the engine that can sample in the background; servers are tested in tests/unit/servers/test_servers.py."""

    def body(rank, world_size):
        engine = build("scripted", model, rank, world_size)
        flight = engine.begin(prompts(0, 1, 2), sampling(), seed=1)
        assert flight.wait() and flight.wait(0.0) and flight.seconds >= 0
        told = [{g.prompt.number: [c.answer_ids for c in g.completions] for g in groups}
                for groups in (flight.groups(), engine.generate(prompts(0, 1, 2), sampling(), seed=1))]  # fmt: skip
        assert told[0] == told[1] and list(told[0]) == [[0, 2], [1]][rank]

    run_ranks(body, 2)


@pytest.mark.parametrize(("name", "tensor_parallel_size"), [("scripted", 1), ("colocated", 1), ("colocated", 2)])
def test_generate_cancelled_on_one_rank_is_cancelled_on_all_and_next_call_succeeds(model, name, tensor_parallel_size):
    def body(rank, world_size):
        from megatron_grpo.core.base.errors import CancelledError

        engine, asked, steps = build(name, model, rank, world_size, tensor_parallel_size), [], []
        if name == "colocated":
            from megatron_grpo.core.rollout import colocated

            colocated.STEPS_BETWEEN_AGREEMENTS = 4
            inner = engine._llm.llm_engine
            step = inner.step
            inner.step = lambda: steps.append(1) or step()
        with engine.wake_up():
            first = engine.generate(prompts(0, 1, 2, 3), sampling(), seed=1)
            from_parts = len(steps)
            steps.clear()
            engine.should_cancel = lambda: rank == 1 and asked.append(1) or len(asked) > 1  # in the middle
            with pytest.raises(CancelledError, match="sampling was cancelled"):
                engine.generate(prompts(0, 1, 2, 3), sampling(), seed=1)
            given_up_after = len(steps)
            engine.should_cancel = lambda: False
            again = engine.generate(prompts(0, 1, 2, 3), sampling(), seed=1)
        told = [{g.prompt.number: [c.answer_ids for c in g.completions] for g in groups} for groups in (first, again)]
        assert told[0] == told[1]
        return from_parts, given_up_after

    found = run_ranks(body, 2)
    if name == "colocated":
        (from_parts, given_up_after), (_, other_rank_steps) = found[1], found[0]
        assert given_up_after == (1 if tensor_parallel_size == 1 else 4) < from_parts
        assert other_rank_steps == (from_parts if tensor_parallel_size == 1 else 4)  # the ranks of one engine step together


@pytest.mark.parametrize("name", ENGINES)
def test_load_weights_consumes_updates_once_and_sets_version(model, name):
    def body(rank, world_size):
        from safetensors.torch import load_file

        from megatron_grpo.core.rollout.engine import WeightSyncError
        from megatron_grpo.core.weights.buckets import NO_VERSION, WeightUpdate

        engine, weights = build(name, model, rank, world_size), load_file(model / "model.safetensors")
        probes = engine.probes()
        consumed = []

        def stream(fail_after=None):
            for place, (name, tensor) in enumerate(weights.items()):
                if place == fail_after:
                    raise RuntimeError("a rank of the trainer failed")
                consumed.append(name)
                yield name, tensor

        def update(version, fail_after=None, kind="weights"):
            return WeightUpdate(kind=kind, version=version, tensors=stream(fail_after))

        assert engine.has_base
        engine.load_weights(update(6, kind="merged"))
        assert engine.version == 6 and not engine.has_base  # an adapter is in it: no other can be added
        with pytest.raises(WeightSyncError):
            engine.load_weights(WeightUpdate(kind="adapter", version=7, tensors=()))
        assert engine.version == NO_VERSION
        consumed.clear()
        engine.load_weights(update(7))
        assert consumed == list(weights) and engine.version == 7 and engine.has_base
        with engine.wake_up():
            assert [group.version for group in engine.generate(prompts(1, 2), sampling(), seed=0)] == [7, 7]
        assert [one.token_ids.tolist() for one in engine.probes()] == [one.token_ids.tolist() for one in probes]
        assert all(one.starts == (0,) and one.mask[1:].all() for one in probes)
        found = engine.scores(probes)
        assert found and not engine.prepare()
        assert all(
            [len(scores) for scores in engine_groups] == [len(probe.token_ids) - 1 for probe in probes] for engine_groups in found.values()
        )

        with pytest.raises(RuntimeError, match="a rank of the trainer failed"):
            engine.load_weights(update(8, fail_after=3))
        assert engine.version == NO_VERSION and not engine.has_base
        with pytest.raises(WeightSyncError, match="no weights"):
            engine.generate(prompts(1), sampling(), seed=0)

    run_ranks(body, 1)


@pytest.mark.parametrize("name", ENGINES)
def test_close_keeps_process_groups_of_the_trainer(model, name):
    def body(rank, world_size):
        import torch
        import torch.distributed as dist

        build(name, model, rank, world_size).close()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(body, 2) == [2.0, 2.0]
