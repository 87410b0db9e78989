"""Seeds and sampling settings that all engines share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.core.rollout.engine import SamplingSettings, prompt_seed
from megatron_grpo.core.settings import RolloutConfig


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(1, 4_000_000 // 2))
def test_request_seeds_are_distinct_across_prompts(run_seed, number, distance):
    n = 1024
    one, other = prompt_seed(run_seed, number, n), prompt_seed(run_seed, number + distance, n)
    gap = min((one - other) % 2**32, (other - one) % 2**32)
    assert gap >= n and 0 <= one < 2**32


def test_prompt_seed_depends_on_run_and_prompt():
    assert prompt_seed(1, 7, 8) == prompt_seed(1, 7, 64)  # not on the group size
    assert len({prompt_seed(run, number, 8) for run in range(20) for number in range(20)}) == 400
    assert prompt_seed(0, 1, 3000) - prompt_seed(0, 0, 3000) >= 3000


def test_greedy_sampling_settings_keep_stop():
    sampling = SamplingSettings.from_config(
        RolloutConfig(temperature=0.7, top_k=5, stop=["x"], stop_token_ids=[9], max_completion_length=12), num_generations=8
    )
    assert (sampling.n, sampling.temperature, sampling.top_k, sampling.stop) == (8, 0.7, 5, ("x",))
    assert sampling.greedy() == SamplingSettings(n=1, temperature=0.0, stop=("x",), stop_token_ids=(9,), max_completion_length=12)
