"""The table of metrics: every row is logged by some code, and plots, rules and trackers use its names."""

from __future__ import annotations

import re
from pathlib import Path

import megatron_grpo
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.evaluation import _training
from megatron_grpo.run.metrics import registry
from megatron_grpo.run.metrics.plots import PLOTS
from megatron_grpo.run.metrics.records import remember
from megatron_grpo.run.metrics.rollout import ENDS

PACKAGE = Path(megatron_grpo.__file__).parent


def test_registry_rows_are_logged_by_some_code():
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name not in ("registry.py", "evaluation.py")
    )
    for metric in registry.metrics():
        literal = re.split(r"[{@]", metric.name)[0]
        if literal.startswith("time/"):  # the blocks of the run's timers, and what is left
            assert re.search(rf'(timers|beside)\("{literal[5:]}"', source) or literal in ("time/step", "time/other"), metric.name
        else:
            assert f'"{literal}' in source or f"{{name}}/{metric.name.rpartition('/')[2]}" in source, metric.name


def test_registry_names_are_unique_with_sentence_descriptions():
    names = [metric.name for metric in registry.metrics()]
    assert len(names) == len(set(names))
    for metric in [metric for rows in registry.groups().values() for metric in rows]:
        assert metric.meaning.endswith(".") and metric.meaning[0].isupper() and "|" not in metric.meaning + metric.when, metric.name
        assert not metric.page or (PACKAGE.parent / "docs" / metric.page).is_file(), metric.page


def test_registry_pattern_matches_names_of_its_family_only():
    assert registry.find("rewards/accuracy/mean").name == "rewards/{name}/mean"
    assert registry.find("environment/tool_calls").name == "environment/{name}"
    assert all(registry.find(f"episodes/ended/{how}") for how in ENDS)
    assert [registry.find(name) for name in ("rewards//mean", "rewards/accuracy", "Loss", "time/lunch")] == [None] * 4
    assert registry.is_total("num_tokens") and not registry.is_total("loss") and not registry.is_total("mine")


def test_plots_and_metric_for_best_model_use_registered_names():
    plotted = [name for plot in PLOTS for name in plot.curves]
    asked = parse("--reward_funcs math --beta 0.1 --log_entropy true --dynamic_sample true".split()).config
    assert [name for name in (*plotted, *_training(asked)) if registry.find(name) is None] == []


def test_registry_plot_metrics_are_kept_in_history():
    history = {}
    remember(history, {"step": 1} | {name: 0.5 for plot in PLOTS for name in plot.curves})
    assert set(history) == {name for plot in PLOTS for name in plot.curves}
