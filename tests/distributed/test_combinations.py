"""Valid losses, importance levels, KL modes and estimators against float64: loss and gradients, in each layout.

The tests run combinations that contain each pair of settings, all of them on one rank and a third of them in each other layout;
`tools/combinations.py` runs all combinations everywhere.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from tests import combinations as every
from tests import parity_cases as cases
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return (material, runs, expected results)."""
    folder = tmp_path_factory.mktemp("combinations")
    made, runs = every.make_inputs(folder), every.iterate_runs(every.list_pairs())
    return made, runs, every.expect(made, runs, folder)


# Where a group, a sequence, the vocabulary or the layers are cut; and the seed that draws a third of the combinations for it.
THIRDS = {"TP2": 1, "PP2": 13, "DP2": 40, "CP2": 26}


def select_third(layout: str) -> list[every.Combination]:
    chosen = every.list_pairs()
    drawn = random.Random(THIRDS[layout]).sample(chosen, len(chosen) // 3)
    # Not each cut lets two ranks have parts of one group, and `real` alone compares those.
    return drawn + [combination for combination in chosen if combination[0] == "real" and combination not in drawn]


def measure_errors(stored, layout: str, chosen: Collection[Any], tamper=None, **settings) -> every.Errors:
    made, runs, right = stored
    runs = {combination: (cfg if combination in chosen else None, cut) for combination, (cfg, cut) in runs.items()}
    case = cases.LAYOUTS[layout]
    words = case.settings | settings
    everyone = run_ranks(lambda *rank: every.measure(*rank, made, words, runs, right, tamper), case.world_size, timeout=180)
    assert len({tuple(found.loss.values()) for found in everyone}) == 1, "ranks report different losses"
    return everyone[-1]


def test_loss_each_pair_of_settings_equals_float64_for_each_batch_split(stored):
    found = measure_errors(stored, "1", every.list_pairs())
    assert len(found.loss) > 40 and not found.beyond()
    assert found.kl_in_reward < 1e-5


@pytest.mark.parametrize("layout", THIRDS)
def test_loss_each_setting_equals_float64_in_each_layout(stored, layout):
    found = measure_errors(stored, layout, select_third(layout))
    assert len(found.loss) > 20 and not found.beyond()
    assert found.kl_in_reward < 1e-5


def test_every_pair_covers_all_pairs_of_settings_and_all_batch_splits():
    chosen = every.list_pairs()
    for one, two in itertools.combinations(range(4), 2):
        kinds = [every.LOSS_TYPES, every.LEVELS, every.KL_MODES, every.ESTIMATORS]
        assert {(c[one], c[two]) for c in chosen} == set(itertools.product(kinds[one], kinds[two])), (every.NAMES[one], every.NAMES[two])
    drawn = [every.make_config(c) for c in chosen]
    assert [c for c, cfg in zip(chosen, drawn, strict=True) if cfg is None] == [c for c in chosen if c[2:] == ("in reward", "gdpo")]
    for name, values in every.OTHERS.items():
        assert {getattr(cfg, name) for cfg in drawn if cfg} == set(values), name
    for layout in THIRDS:
        legal = [combination for combination in select_third(layout) if every.make_config(combination) is not None]
        for place, kind in enumerate((every.LOSS_TYPES, every.LEVELS, every.KL_MODES, every.ESTIMATORS)):
            assert {combination[place] for combination in legal} == set(kind), (layout, every.NAMES[place])


def take_each_ranks_own_entropy_threshold(policy):
    from megatron_grpo.core.policy import passes as module

    threshold = module.entropy_threshold  # a rank that hears only itself of its group
    module.entropy_threshold = lambda *entropies, over_ranks: threshold(*entropies, over_ranks=lambda counts: counts)


def compare_completions_on_one_rank_alone(policy):
    """Mutation: `real` compares only completions of a group on this rank."""
    from megatron_grpo.core.policy import passes as module

    module.collectives = SimpleNamespace(**vars(module.collectives) | {"all_gather_object": lambda mine: [mine]})


def ask_the_policy_for_the_references_log_probs(policy):
    policy.reference.scorer.model = policy.wrapped


@pytest.mark.parametrize(
    "mistake", [take_each_ranks_own_entropy_threshold, compare_completions_on_one_rank_alone, ask_the_policy_for_the_references_log_probs]
)
def test_loss_mutation_is_detected(stored, mistake):
    assert measure_errors(stored, "DP2", select_third("DP2"), mistake).beyond(loss=1e-4, gradient=1e-3)


# ---- a teacher's word on each token ----------------------------------------------------------------------------------------------------

TAUGHT = ("grpo", "dapo", "cispo", "sapo", "sequence_sum")


@pytest.fixture(scope="module")
def with_a_teacher(tmp_path_factory):
    """Return one run of each of these with a teacher, with splits that put rows of a group into one sequence."""
    folder, cut = tmp_path_factory.mktemp("taught"), {"micro_batch_size": 4}
    words = dict(teacher_model_server=("http://teacher:8000",), teacher_kl_coef=0.7, epsilon=0.05)
    made, runs = every.make_inputs(folder), {name: (every.validate(dict(loss_type=name, **words)), cut) for name in TAUGHT}
    return made, runs, every.expect(made, runs, folder)


@pytest.mark.parametrize("layout", ["1", "TP2", "CP2", "PP2"])
def test_teacher_logprobs_with_shared_prefix_equal_float64(with_a_teacher, layout):
    found = measure_errors(with_a_teacher, layout, TAUGHT, share_prefix="true")
    assert found.loss.keys() == set(TAUGHT) and not found.beyond()


def change_what_the_teacher_says(change):
    def tamper(policy):
        from megatron_grpo.core.grpo import objectives as module

        right = module.teacher_log_ratio
        module.teacher_log_ratio = lambda teacher, old: change(right, teacher, old)

    return tamper


MISTAKES = {
    "a sign": lambda right, teacher, old: -right(teacher, old),
    "one token off": lambda right, teacher, old: right(teacher.roll(1), old),
    "of the row before": lambda right, teacher, old: right(teacher.flip(0), old),
    "the policy forgotten": lambda right, teacher, old: right(teacher, 0.0 * old),
    "unseen rows at 0": lambda right, teacher, old: right(teacher.nan_to_num(nan=0.0), old),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_teacher_mutation_is_detected(with_a_teacher, mistake):
    found = measure_errors(with_a_teacher, "1", TAUGHT, change_what_the_teacher_says(MISTAKES[mistake]))
    assert {key[0] for key in found.beyond(gradient=1e-3)} == set(TAUGHT)
