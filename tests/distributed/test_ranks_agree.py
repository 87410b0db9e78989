"""Ranks with different settings get the same error before groups are made; ranks with equal settings continue."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

SAME = {"lr": "0.001", "seed": "42", "The model": "qwen3 1"}
CASES = {
    "same": [SAME, SAME, dict(reversed(SAME.items()))],
    "another": [SAME, SAME, SAME | {"lr": "0.01"}],
    "content": [SAME, SAME | {"The model": "qwen3 2"}, SAME | {"The model": "qwen3 2"}],
    "variable": [SAME, SAME, SAME | {"MAX_PIXELS": "9"}],
    "several": [SAME | {"MIN_PIXELS": "3"}, SAME | {"seed": "4"}, SAME | {"MIN_PIXELS": "3", "lr": "5"}],
}


def read_errors(rank, world_size, cases):
    from megatron_grpo.core.base.errors import ConfigError
    from megatron_grpo.core.parallel import state
    from megatron_grpo.core.parallel.layout import Layout

    found = {}
    for name, facts in cases.items():
        # A layout that the others do not have would hang, or end in Megatron-Core's own words.
        layout = Layout(world_size=world_size) if name == "same" else Layout(world_size=world_size, tp=world_size if rank else 1)
        try:
            state.start(layout, facts=facts[rank])
            found[name] = []
        except ConfigError as error:
            found[name] = [problem.message for problem in error.problems]
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(read_errors, 3, {name: CASES[name] for name in reversed(CASES)})


@pytest.mark.parametrize(
    ("case", "sentences"),
    [
        ("same", []),
        ("another", ["lr differs between ranks: rank 0 has 0.001, rank 2 has 0.01."]),
        ("content", ["The model differs between ranks: rank 0 has qwen3 1, rank 1 has qwen3 2."]),
        ("variable", ["MAX_PIXELS differs between ranks: rank 0 has none, rank 2 has 9."]),
        (
            "several",
            [
                "lr differs between ranks: rank 0 has 0.001, rank 2 has 5.",
                "seed differs between ranks: rank 0 has 42, rank 1 has 4.",
                "MIN_PIXELS differs between ranks: rank 0 has 3, rank 1 has none.",
            ],
        ),
    ],
)
def test_settings_difference_between_ranks_is_one_error_with_rank_and_values(ranks, case, sentences):
    assert [rank[case] for rank in ranks] == [[f"{sentence} Use the same value on all ranks." for sentence in sentences]] * 3
