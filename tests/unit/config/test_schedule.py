"""Learning rate and weight decay of Megatron-Core's scheduler over a run, against formulas written out here."""

from __future__ import annotations

import math

import pytest

from megatron_grpo.core.settings import OptimizerConfig
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.schedule import length_problems
from tests.ranks import run_ranks

STEPS, LR, MIN = 20, 0.5, 0.1


def compute_decay(passed: float, style: str) -> float:
    """1 at the beginning of a decay, 0 at its end (MiniCPM, arXiv 2404.06395, for WSD's shapes as Megatron-Core has them)."""
    return {
        "linear": 1 - passed,
        "cosine": (1 + math.cos(math.pi * passed)) / 2,
        "exponential": 2 * 0.5**passed - 1,
        "minus_sqrt": 1 - math.sqrt(passed),
    }[style]


def compute_rate(step: int, *, style: str, warmup: int = 4, end: int = STEPS, anneal: int = 0, shape: str = "") -> float:
    begin = 0.05
    if step <= warmup:
        return begin + (LR - begin) * step / warmup
    if step > end:
        return MIN
    if style == "inverse-square-root":
        return max(MIN, LR * math.sqrt(warmup / step))
    if style == "WSD":
        return MIN + (LR - MIN) * (compute_decay((step - (end - anneal)) / anneal, shape) if step > end - anneal else 1)
    return MIN + (LR - MIN) * compute_decay((step - warmup) / (end - warmup), style)


CASES = [
    ({"lr_decay_style": "inverse-square-root"}, {"style": "inverse-square-root"}),
    ({"lr_decay_style": "linear", "lr_decay_iters": 12}, {"style": "linear", "end": 12}),
    *(
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6, "lr_wsd_decay_style": shape}, {"style": "WSD", "anneal": 6, "shape": shape})
        for shape in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
]
DECAYS = {"linear": lambda x: x, "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2}


def test_lr_and_weight_decay_follow_formulas_at_every_step():
    def body(rank, world_size):
        from types import SimpleNamespace

        from megatron_grpo.core.policy.optimizer import build_scheduler

        def course(settings):
            groups = [{}, {"wd_mult": 0.0}, {"max_lr": 0.25, "min_lr": 0.05}]
            cfg = OptimizerConfig(lr=LR, min_lr=MIN, lr_warmup_iters=4, lr_warmup_init=0.05, **settings)
            scheduler = build_scheduler(SimpleNamespace(param_groups=groups), cfg, num_steps=STEPS)
            for _ in range(STEPS):
                yield [group["lr"] for group in groups], [group["weight_decay"] for group in groups]
                scheduler.step(1)

        for settings, expected in CASES:
            found = [rates[0] for rates, _ in course(settings)]
            assert found == pytest.approx([compute_rate(step, **expected) for step in range(STEPS)], rel=1e-12), settings
        for style, rising in DECAYS.items():
            both = course({"weight_decay_incr_style": style, "start_weight_decay": 0.1, "end_weight_decay": 0.3})
            found = [decays for _, decays in both]
            assert [one[0] for one in found] == pytest.approx([0.1 + 0.2 * rising(step / STEPS) for step in range(STEPS)], rel=1e-12)
            assert {one[1] for one in found} == {0.0}, "what does not decay does not begin to"

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"lr_decay_style": "WSD"}, "lr_decay_style WSD requires lr_wsd_decay_iters"),
        ({"lr_wsd_decay_iters": 5}, "lr_wsd_decay_iters (5) requires lr_decay_style WSD; lr_decay_style is constant"),
        ({"lr_wsd_decay_style": "linear", "lr_decay_style": "cosine"}, "requires lr_decay_style WSD; lr_decay_style is cosine"),
        ({"lr_decay_iters": 5}, "lr_decay_iters (5) has no effect with lr_decay_style constant"),
        ({"lr_warmup_init": 1.0}, "lr_warmup_init (1.0) must not be above lr"),
        ({"end_weight_decay": 0.1}, "require weight_decay_incr_style linear or cosine"),
        ({"weight_decay_incr_style": "linear", "start_weight_decay": 0.1}, "requires start_weight_decay and end_weight_decay"),
        ({"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.0}, "only increases weight decay"),
        ({"weight_decay_incr_style": "cosine", "start_weight_decay": 0, "end_weight_decay": 1, "weight_decay": 0.3},
         "weight_decay (0.3) has no effect with"),
    ],
)  # fmt: skip
def test_lr_schedule_incompatible_settings_give_one_problem(values, sentence):
    [problem] = validate(Config().with_values(values))
    assert sentence in problem.message


def test_lr_wsd_decay_longer_than_run_is_rejected_with_longest_that_fits():
    opt = OptimizerConfig(lr_decay_style="WSD", lr_wsd_decay_iters=10, lr_warmup_iters=4)
    assert length_problems(opt, 14) == [] and length_problems(opt, None) == []
    [problem] = length_problems(opt, 12)
    assert problem.nearest == {"lr_wsd_decay_iters": [8]} and "12 - 4 = 8" in problem.message
