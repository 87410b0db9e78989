"""A part of tools/parity.py with two steps: losses, all gradient tensors and weights, against float64 in one process."""

from __future__ import annotations

import pytest

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

# In each layout two of these, in turn; all combinations are the tool's business.
RUNS = (("grpo", "1 each"), ("dapo", "packed"), ("GSPO", "2 each"), ("top entropy", "1 each"))
DENSE = ["1", "TP2 SP", "PP2 uneven", "PP2 VPP2", "CP2", "DP2", "TP2 SP CP2", "PP2 VPP2 DP2"]
EXPERTS = ["TP2 SP", "TP2 ETP2", "CP2", "EP2", "TP2 EP2 ETP1", "TP2 EP2 ETP2", "PP2 VPP2 EP2"]
WAYS = ["recompute full, uniform", "recompute selective, moe", "overlapped gradients and parameters, experts", "all-gather dispatcher, EP2"]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    made = {}

    def get(model: str):
        if model not in made:
            path = write_tiny(tmp_path_factory.mktemp("models") / model, **cases.MODELS[model])
            batches = cases.stored_rollout(path, num_steps=2, vocab=125)
            made[model] = path, batches, {}
        path, batches, losses = made[model]
        own = cases.MODEL_SETTINGS.get(model, {})
        return (
            path,
            batches,
            lambda loss: (
                losses.get(loss) or losses.setdefault(loss, cases.reference(path, cases.settings(**own, **cases.LOSSES[loss]), batches))
            ),
        )

    return get


def assert_equal(model: str, matrix, layout: cases.Case, place: int, **more):
    path, batches, right = matrix(model)
    legal = [key for key in RUNS if cases.is_legal(layout, cases.CUTS[key[1]])]
    chosen = {legal[2 * place % len(legal)], legal[(2 * place + 1) % len(legal)]}
    runs = {key: cases.LOSSES[key[0]] | cases.CUTS[key[1]] | more for key in chosen}
    found = cases.compare(model, path, layout, runs, batches, {key: right(key[0]) for key in runs})
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


@pytest.mark.parametrize("name", DENSE)
def test_dense_steps_equal_float64(matrix, name):
    assert_equal("dense", matrix, cases.LAYOUTS[name], DENSE.index(name))


def test_pipeline_layout_with_an_empty_last_stage_equals_float64(matrix):
    laid_out = {"pipeline_model_parallel_layout": "Et|tt|t|L", "microbatch_group_size_per_vp_stage": 4}
    assert_equal("dense", matrix, cases.Case(2, {cases.PP: 2, cases.VPP: 2, **laid_out}), 0)


@pytest.mark.parametrize("name", EXPERTS)
def test_steps_with_experts_and_z_loss_equal_float64(matrix, name):
    assert_equal("MoE", matrix, cases.LAYOUTS[name], EXPERTS.index(name))


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_run_a_step_equal_float64(matrix, way):
    layout, settings = cases.WAYS[way]
    layout = cases.LAYOUTS[layout]
    assert_equal("MoE" if layout.needs_experts else "dense", matrix, layout, WAYS.index(way), **settings)


SHAPES = {
    "three groups of three heads, PP2": ("PP2", dict(heads=9, kv_heads=3)),
    "three groups, CP2": ("CP2", dict(heads=9, kv_heads=3)),
    "one group for two ranks": ("TP2 SP", dict(heads=4, kv_heads=1)),
    "a prime vocabulary, TP2": ("TP2", dict(vocab=127, tied=True)),
    "a vocabulary shard of padding alone, TP2": ("TP2", dict(padded_vocab_multiple=128)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_odd_shapes_equal_float64(tmp_path, name):
    layout, shape = SHAPES[name]
    run = {key: shape[key] for key in shape if key == "padded_vocab_multiple"}
    shape = {key: value for key, value in shape.items() if key not in run}
    path = write_tiny(tmp_path / "model", "qwen3", **dict(layers=4, vocab=125, std=0.1) | shape)
    batches = cases.stored_rollout(path, vocab=shape.get("vocab", 125))
    right = cases.reference(path, cases.settings(), batches)
    (found,) = cases.compare("dense", path, cases.LAYOUTS[layout], {"grpo": run}, batches, {"grpo": right}).values()
    assert found.within(), found


@pytest.mark.parametrize(("layout", "quantiles"), [("1", (0.1, 0.2, 0.3, 0.7, 0.8, 0.9)), ("CP3", (0.2, 0.8))], ids=["1", "CP3"])
def test_entropy_threshold_selects_first_tokens_of_a_group_together(tmp_path, layout, quantiles):
    """Their entropies differ by rounding only, and each quantile of the cases is at a group's first tokens."""
    path = write_tiny(tmp_path / "model", "qwen3", layers=2, vocab=125, std=0.3)
    batches = cases.stored_rollout(path, vocab=125, groups=((3, (1, 1, 2, 1)), (5, (2, 1, 1, 1))))
    losses = {quantile: dict(loss_type="dapo", top_entropy_quantile=quantile) for quantile in quantiles}
    right = {quantile: cases.reference(path, cases.settings(**loss), batches) for quantile, loss in losses.items()}
    runs = {(quantile, cut): losses[quantile] | sizes for quantile in losses for cut, sizes in cases.CUTS.items()}
    found = cases.compare("dense", path, cases.LAYOUTS[layout], runs, batches, {key: right[key[0]] for key in runs})
    assert [(key, distance) for key, distance in found.items() if not distance.within(loss=1e-5)] == []


@pytest.mark.parametrize("layout", ["1", "CP2", "TP2 SP", "PP2 VPP2"])
def test_short_sequences_and_ranks_without_a_trained_token_equal_float64(tmp_path, layout):
    """Two tokens in all: under CP one rank trains none. One completion trains none at all."""
    path = write_tiny(tmp_path / "model", "qwen3", layers=4, vocab=125, std=0.1)
    batches = cases.stored_rollout(path, vocab=125, groups=((1, (1, 1)), (1, (2,)), (2, (1,))))
    batches[0][1].mask[:] = False
    right = cases.reference(path, cases.settings(), batches)
    (found,) = cases.compare("dense", path, cases.LAYOUTS[layout], {"grpo": {}}, batches, {"grpo": right}).values()
    assert found.within(loss=1e-5), found


# Prompts of one token with empty completions: nothing to compute. One or two of them make a micro-batch.
EMPTY = ((1, (0, 0, 2, 0)), (3, (0, 1)), (1, (0, 0)))
WITH_EMPTY = ["1", "TP2", "TP2 SP", "PP2", "PP2 VPP2", "CP2", "TP2 SP CP2", "EP2"]


@pytest.mark.parametrize("name", WITH_EMPTY)
def test_micro_batches_without_tokens_equal_float64(tmp_path, name):
    layout = cases.LAYOUTS[name]
    model = "MoE" if layout.needs_experts else "dense"
    path = write_tiny(tmp_path / "model", **cases.MODELS[model])
    batches = cases.stored_rollout(path, vocab=125, groups=EMPTY, stale=0.3)
    right = cases.reference(path, cases.settings(**cases.MODEL_SETTINGS.get(model, {}), **cases.LOSSES["GSPO"]), batches)
    runs = {cut: cases.LOSSES["GSPO"] | sizes for cut, sizes in cases.CUTS.items() if cases.is_legal(layout, sizes)}
    found = cases.compare(model, path, layout, runs, batches, dict.fromkeys(runs, right))
    assert [(key, distance) for key, distance in found.items() if not distance.within(loss=1e-5)] == []


@pytest.mark.parametrize("name", ["PP2 VPP2", "EP2"])
def test_global_batch_without_tokens_skips_the_step(tmp_path, name):
    layout = cases.LAYOUTS[name]
    model = "MoE" if layout.needs_experts else "dense"
    path = write_tiny(tmp_path / "model", **cases.MODELS[model])
    (samples,) = cases.stored_rollout(path, vocab=125, groups=((1, (0,) * 8),), stale=0)

    def body(rank, world):
        policy = cases.build(path, cases.settings(**cases.MODEL_SETTINGS.get(model, {}), **layout.settings), world)
        batch = cases.make_batch(policy, samples, 0)
        trained = policy.train_step(batch)
        lengths = [len(scored) for scored in cases.score_tokens(policy, [[5], [5, 6, 7]])]
        return trained.skipped is not None, trained.metrics["loss"], batch.metrics["packing/efficiency"], lengths

    assert run_ranks(body, layout.world_size) == [(True, 0.0, 0.0, [0, 2])] * layout.world_size
