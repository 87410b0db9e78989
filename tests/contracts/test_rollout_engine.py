"""What `rollout.engine.RolloutEngine` promises, kept by every engine there is."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

ENGINES = ["scripted", "colocated"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), max_positions=512)


def build(name, model, rank, world_size):
    """Imported late: the test process itself never loads vLLM."""
    if name == "scripted":
        from megatron_grpo.rollout.scripted import ScriptedEngine
        from tests.end_to_end.scripted import answers

        return ScriptedEngine(answers(model, 1.0))
    from megatron_grpo.rollout.colocated import ColocatedEngine
    from megatron_grpo.settings.config import RolloutConfig

    cfg = RolloutConfig(vllm_kv_cache_memory_mb=8, vllm_max_num_seqs=32)
    return ColocatedEngine.build(cfg, model_path=model, dtype="float32", max_model_len=128, seed=0, rank=rank, world_size=world_size)


def prompts(*numbers):
    from megatron_grpo.types import Prompt

    return [Prompt(number=i, row=i, raw="", token_ids=tuple(range(4 + i, 9 + 2 * i)), columns={}) for i in numbers]


def sampling(n=3):
    from megatron_grpo.rollout.engine import SamplingSettings

    return SamplingSettings(n=n, max_completion_length=8)


@pytest.mark.parametrize("name", ENGINES)
def test_groups_are_whole_in_the_order_of_their_prompts_and_the_same_on_every_rank(model, name):
    def body(rank, world_size):
        engine = build(name, model, rank, world_size)
        assert engine.version == 0 and engine.dtype == "float32"
        asked = prompts(0, 1, 2, 3, 4)
        with engine.awake():
            groups = engine.generate(asked, sampling(), seed=1)
            # A refill of dynamic sampling asks again with the same weights; a single prompt leaves engines without work.
            further = engine.generate(prompts(5), sampling(), seed=1)
            assert engine.generate([], sampling(), seed=1) == []
            reversed_groups = engine.generate(asked[::-1], sampling(), seed=1)
            (greedy,) = engine.generate(asked[:1], sampling().greedy(), seed=1)
        assert engine.version == 0
        for prompt, group in zip(asked, groups, strict=True):
            assert group.prompt is prompt and group.version == 0 and len(group.completions) == 3
            for completion in group.completions:
                assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 8 and max(completion.logprobs) < 0
                assert all(type(token) is int for token in completion.token_ids) and completion.finish_reason in ("stop", "length")
        tokens = [[completion.token_ids for completion in group.completions] for group in [*groups, *further]]
        assert [[c.token_ids for c in group.completions] for group in reversed_groups] == tokens[:5][::-1]
        assert len({ids for group in tokens for ids in group}) == 18 and len(greedy.completions) == 1
        return tokens

    first, second = run_ranks(body, 2)
    assert first == second


@pytest.mark.parametrize("name", ENGINES)
def test_impossible_log_probs_are_refused_completion_by_completion_and_a_whole_rollout_of_them_stops(model, name):
    def body(rank, world_size):
        from megatron_grpo.rollout import colocated
        from megatron_grpo.rollout.logprobs import ImpossibleLogprobs, is_refused

        def breaks(real, places):
            """Every so many of the log-probs asked for begin with NaN."""
            calls = []

            def logprobs(*args):
                calls.append(0)
                return (float("nan"), *real(*args)[1:]) if len(calls) % 3 in places else real(*args)

            return logprobs

        engine = build(name, model, rank, world_size)
        if name == "scripted":
            import dataclasses

            answer = engine._answer

            def breaking(places):
                changed = breaks(lambda *args: answer(*args).logprobs, places)
                engine._answer = lambda *args: dataclasses.replace(answer(*args), logprobs=changed(*args))
        else:
            real = colocated._sampled_logprobs

            def breaking(places):
                colocated._sampled_logprobs = breaks(real, places)

        with engine.awake():
            breaking({2})
            groups = engine.generate(prompts(0, 1), sampling(), seed=1)
            assert [[is_refused(one) for one in group.completions] for group in groups] == [[False, True, False]] * 2
            breaking({0, 1, 2})
            with pytest.raises(ImpossibleLogprobs, match="6 of 6 completions.*completion 0 of prompt 0"):
                engine.generate(prompts(0, 1), sampling(), seed=1)

    run_ranks(body, 1)


@pytest.mark.parametrize("name", ENGINES)
def test_pushed_weights_are_consumed_once_and_become_the_version(model, name):
    def body(rank, world_size):
        from safetensors.torch import load_file

        from megatron_grpo.rollout.engine import WeightSyncError

        engine, weights = build(name, model, rank, world_size), load_file(model / "model.safetensors")
        probes = engine.probes()
        consumed = []

        def stream(fail_after=None):
            for place, (name, tensor) in enumerate(weights.items()):
                if place == fail_after:
                    raise RuntimeError("a rank of the trainer failed")
                consumed.append(name)
                yield name, tensor

        engine.update_weights(stream(), version=7)
        assert consumed == list(weights) and engine.version == 7
        with engine.awake():
            assert [group.version for group in engine.generate(prompts(1, 2), sampling(), seed=0)] == [7, 7]
        assert engine.probes() == probes and all(isinstance(token, int) for probe in probes for token in probe)
        assert [len(scores) for scores in engine.score(probes)] == [len(probe) - 1 for probe in probes]

        with pytest.raises(RuntimeError, match="a rank of the trainer failed"):
            engine.update_weights(stream(fail_after=3), version=8)
        assert engine.version == -1
        with pytest.raises(WeightSyncError, match="no weights"):
            engine.generate(prompts(1), sampling(), seed=0)

    run_ranks(body, 1)


@pytest.mark.parametrize("name", ENGINES)
def test_the_trainers_groups_outlive_a_closed_engine(model, name):
    def body(rank, world_size):
        import torch
        import torch.distributed as dist

        build(name, model, rank, world_size).close()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(body, 2) == [2.0, 2.0]
