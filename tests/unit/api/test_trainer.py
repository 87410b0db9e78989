"""`GRPOTrainer` and `plan`, without starting ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_grpo
from megatron_grpo import GRPOConfig, GRPOTrainer, plan
from megatron_grpo.api import launch
from megatron_grpo.api.trainer import RunResult
from megatron_grpo.core.base.errors import ConfigError
from tests.end_to_end.runs import write_inputs

ROWS = [{"prompt": "4 5 6", "answer": "x"}] * 40


def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder / "model"


def make_settings(tmp_path, **more):
    sizes = {"num_generations": 4, "global_batch_size": 16, "micro_batch_size": 4, "max_completion_length": 8, "max_steps": 3}
    return GRPOConfig(torch_dtype="float32", output_dir=str(tmp_path / "out"), **(sizes | more))


def test_plan_accepts_python_objects(model, tmp_path):
    made = GRPOTrainer(model, even, make_settings(tmp_path), ROWS, {"held": ROWS[:4]}, nproc_per_node=2).plan()
    assert (made.schedule.num_steps, made.num_prompts, made.checked.sizes.layout.world_size) == (3, 40, 2)
    assert made.checked.config.rewards.reward_funcs == ["python:even"]
    assert made.checked.config.eval.eval_datasets == {"held": "python:eval_dataset_held"}
    page = made._repr_html_()
    assert "<td>optimizer steps</td><td>3</td>" in page
    assert not (tmp_path / "out").exists()


def test_a_dataset_of_datasets_is_read(model, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    assert plan(make_settings(tmp_path), model=model, reward_funcs=[even], train_dataset=rows).num_prompts == 40


def test_trainer_uses_config_assignments_made_later(model, tmp_path):
    args = make_settings(tmp_path)
    made = GRPOTrainer(model, even, args, ROWS)
    args.learning_rate = 3e-4
    assert made.parsed().config.optimizer.lr == 3e-4


def test_trainer_reports_errors_before_starting_ranks(model, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "RankProcesses", None)
    with pytest.raises(ConfigError, match="micro_batch_size"):
        GRPOTrainer(model, even, make_settings(tmp_path, micro_batch_size=7), ROWS).train()
    with pytest.raises(ConfigError, match="model is missing: pass it to GRPOTrainer.\nreward_funcs is missing.*\ntrain_dataset is missing"):
        GRPOTrainer(args=make_settings(tmp_path)).train()
    with pytest.raises(ConfigError, match="temprature in GRPOConfig is not a setting.*\ntop_p .* must be"):
        GRPOTrainer(model, even, make_settings(tmp_path), ROWS, ROWS).evaluate(temprature=1.0, top_p=2.0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (iter(ROWS), "train_dataset is a list_iterator: pass a path or Hub name, a list of dicts"),
        ([["a"]], "train_dataset: its first row is a list. Each row is a dict"),
        ({"train": ROWS}, "train_dataset is a dict"),
    ],
)
def test_trainer_with_invalid_dataset_is_rejected(rows, why):
    with pytest.raises(ConfigError, match=why):
        GRPOTrainer("m", even, None, rows)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"reward_funcs": 3}, "reward_funcs: 3 is neither callable nor a name. Pass a function, or a name as for --reward_funcs"),
        ({"tools": [even, {}]}, "tools: {} is neither callable nor a name"),
        ({"nproc_per_node": 0}, "nproc_per_node must be a whole number of at least 1, not 0"),
        ({"nproc_per_node": "2"}, "nproc_per_node must be a whole number of at least 1, not '2'"),
    ],
)
def test_trainer_with_argument_of_wrong_type_is_rejected(parts, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        GRPOTrainer("m", **parts)


def test_trainer_number_of_ranks_follows_settings_and_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def of(number=None, **args):
        return GRPOTrainer("m", even, args, nproc_per_node=number)._num_ranks()

    assert [of(), of(3), of(world_size=4), of(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)] == [1, 3, 4, 4]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert of() == 2


def test_trainer_docstring_and_docs_state_that_changes_in_ranks_are_lost():
    page = (Path(__file__).parents[3] / "docs" / "python_api.md").read_text()
    [limit] = [line for line in page.splitlines() if "have copies" in line]
    for text in (limit, " ".join((GRPOTrainer.__doc__ or "").split())):
        assert "appends to a list of the program is lost" in text and "callback" in text


def test_trainer_reward_functions_with_equal_names_get_distinct_names():
    one, two = (lambda completions: [0.0]), (lambda completions: [1.0])
    made = GRPOTrainer("m", [one, two, even, "accuracy"], None, "data.jsonl", rollout_func="a.py:b")
    found = made._settings()
    assert found["reward_funcs"] == ["python:reward_0", "python:reward_1", "python:even", "accuracy"]
    assert (found["dataset"], found["rollout_func"]) == ("data.jsonl", "a.py:b") and made.objects["reward_1"] is two


def test_trainer_save_model_copies_the_export_and_fails_before_it_exists(tmp_path):
    made = GRPOTrainer("m", even, {"output_dir": str(tmp_path / "out")})
    with pytest.raises(ConfigError, match="hf does not exist: a run exports its model at its end. Call train until"):
        made.save_model(tmp_path / "copy")
    (tmp_path / "out/hf").mkdir(parents=True)
    (tmp_path / "out/hf/config.json").write_text("{}")
    assert (made.save_model(tmp_path / "copy") / "config.json").is_file()


def test_train_result_repr_is_a_table(tmp_path):
    history = [{"step": 1, "reward": 0.25, "num_tokens": 8}, {"step": 2, "reward": 0.5, "num_tokens": 1600}]
    result = RunResult(output_dir=tmp_path, step=2, finished=True, history=history, evaluations=[])
    assert "<td>0.250 → 0.500</td>" in result._repr_html_() and "<td>1,600</td>" in result._repr_html_()
    assert result.metrics == history[-1] and result.model == tmp_path / "hf"
    assert "optimizer steps" in RunResult(output_dir=tmp_path, step=0, finished=False, history=[], evaluations=[])._repr_html_()


def test_public_names_are_listed_and_come_without_torch():
    assert {"GRPOConfig", "GRPOTrainer", "RunResult", "plan", "score"} <= {*dir(megatron_grpo)}
    code = "import sys; from megatron_grpo import GRPOTrainer, plan, score; print({'torch', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
