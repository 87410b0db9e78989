"""Agents on real vLLM: one rank, two engines, and one engine of two ranks give the same turns, and their log-probs equal transformers'."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.core.rollout.engine import SamplingSettings
from tests.agents import branching, list_turns, stage
from tests.chat_models import DROPS, chat_tokenizer, write_chat
from tests.distributed.test_episodes import build_engine, make_prompts
from tests.ranks import run_ranks
from tests.tiny_models import hf_logprobs, load_tiny

SAMPLING = SamplingSettings(n=4, max_completion_length=3000, temperature=1.0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_chat(tmp_path_factory.mktemp("model"), template=DROPS, ends=10.5)


def find_worst_gap(groups, model) -> float:
    """Return the largest |sampled log-prob - transformers'| of all trained tokens in their contexts."""
    worst = 0.0
    for row in (one for group in groups for one in group.completions):
        for begin, end in row.sequence.contexts:
            is_sampled = row.sequence.mask[begin + 1 : end]
            expected = hf_logprobs(model, row.sequence.token_ids[begin:end].tolist()).numpy()
            worst = max(worst, float(np.abs(expected - row.logprobs[begin + 1 : end])[is_sampled].max()))
    return worst


def test_agents_answers_are_equal_in_each_engine_layout(model_path):
    def body(rank, world_size, tp):
        from megatron_grpo.plugins.environments.agents import AgentSampler
        from megatron_grpo.plugins.environments.trajectory import ChatTemplate

        template = ChatTemplate(chat_tokenizer(DROPS), end_ids=[2, 0])
        rules = dict(template=template, max_model_len=800, concurrency=32, needs_reward=True)
        with build_engine(model_path, rank, world_size, tp=tp) as engine:
            groups = AgentSampler(engine, stage(branching, **rules)).generate(make_prompts(5, DROPS), SAMPLING, seed=3)
        rows = [row for group in groups for row in group.completions]
        assert all((row.finish_reason, row.record.numbers.fault) == ("done", "") for row in rows)
        assert all(row.record.numbers.num_turns == 5 and len(row.sequence.contexts) >= 3 for row in rows)
        assert find_worst_gap(groups, load_tiny(model_path)) < 5e-5
        return list_turns(groups)

    [alone] = run_ranks(body, 1, 1, timeout=120)
    assert sorted(alone) == list(range(5)) and len({str(row) for rows in alone.values() for row in rows}) == 20
    for tp in (1, 2):
        first, second = run_ranks(body, 2, tp, timeout=180)
        assert not set(first) & set(second) and first | second == alone, tp
