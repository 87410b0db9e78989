"""What all engines share: seeds, settings, and completions on their way between ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.rollout.completions import to_arrays, to_completions
from megatron_grpo.rollout.engine import SamplingSettings, prompt_seed
from megatron_grpo.settings.config import RolloutConfig
from megatron_grpo.types import Completion

completions = st.builds(
    Completion,
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    logprobs=st.lists(st.floats(-50, 0, width=32), max_size=5).map(tuple),
    text=st.text(max_size=5),
    finish_reason=st.sampled_from(["stop", "length"]),
).filter(lambda completion: len(completion.token_ids) == len(completion.logprobs))


@given(st.lists(st.lists(completions, max_size=3).map(tuple), max_size=4))
def test_packing_loses_nothing(groups):
    assert to_completions(to_arrays(groups)) == groups


def test_digest_sees_a_token_and_where_a_completion_ends_but_not_the_last_bit_of_a_logprob():
    def digest(*token_ids, logprob=-1.0):
        return to_arrays(
            [[Completion(token_ids=ids, logprobs=(logprob,) * len(ids), text="", finish_reason="stop") for ids in token_ids]]
        ).digest()

    assert digest((1, 2), (3,)) == digest((1, 2), (3,), logprob=-1.0000001)
    assert len({digest((1, 2), (3,)), digest((1,), (2, 3)), digest((1, 2), (4,))}) == 3


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(1, 4_000_000 // 2))
def test_no_completion_of_two_prompts_shares_a_seed(run_seed, number, distance):
    n = 1024
    one, other = prompt_seed(run_seed, number, n), prompt_seed(run_seed, number + distance, n)
    gap = min((one - other) % 2**32, (other - one) % 2**32)
    assert gap >= n and 0 <= one < 2**32


def test_seed_of_a_prompt_depends_on_the_run_and_on_the_prompt():
    assert prompt_seed(1, 7, 8) == prompt_seed(1, 7, 64)  # not on the group size
    assert len({prompt_seed(run, number, 8) for run in range(20) for number in range(20)}) == 400
    assert prompt_seed(0, 1, 3000) - prompt_seed(0, 0, 3000) >= 3000


def test_greedy_keeps_where_to_stop():
    sampling = SamplingSettings.of(
        RolloutConfig(temperature=0.7, top_k=5, stop=["x"], stop_token_ids=[9], max_completion_length=12), num_generations=8
    )
    assert (sampling.n, sampling.temperature, sampling.top_k, sampling.stop) == (8, 0.7, 5, ("x",))
    assert sampling.greedy() == SamplingSettings(n=1, temperature=0.0, stop=("x",), stop_token_ids=(9,), max_completion_length=12)


def test_packed_arrays_are_small():
    group = [Completion(token_ids=tuple(range(1000)), logprobs=(-0.5,) * 1000, text="", finish_reason="length")] * 4
    packed = to_arrays([group])
    assert packed.token_ids.nbytes + packed.logprobs.nbytes == 4 * 1000 * 8 and packed.logprobs.dtype == np.float32
