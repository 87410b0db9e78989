"""Selection and retention of the best checkpoint, on folders that contain only a manifest."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.checkpoint.manifest import CheckpointDirectory, RunFingerprint, manifest_content
from megatron_grpo.run.checkpoint.output_files import BestCheckpoint


class CheckpointingRun:
    """Saves a checkpoint and reports a metric per step as the loop does: training metrics before the save, evaluations after it."""

    def __init__(self, path, *, greater=True, limit=2, metric="reward"):
        self.folder, self.limit, self.said = CheckpointDirectory(path / "checkpoints"), limit, []
        self.best = BestCheckpoint(self.folder.path, metric, greater=greater, print_line=self.said.append)

    def save(self, step):
        self.folder.begin(step)
        self.folder.commit(
            step, manifest_content(RunFingerprint(), Progress(step=step), world_size=1, torch="", num_pending=0, versions={}), {}
        )
        self.best.record_saved(step)
        self.folder.retain(self.limit, newest=step, best=self.best.step)

    def go(self, values, *, evaluates=False):
        for step, value in values.items():
            if not evaluates:
                self.best.record(step, {"reward": value})
            self.save(step)
            if evaluates:
                self.best.record(step, {"reward": value})
        return self

    @property
    def written(self):
        return json.loads((self.folder.path / "best.json").read_text())


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(("greater", "best", "limit", "kept"), [(True, 2, 2, [2, 5]), (False, 4, 1, [4, 5]), (False, 4, 3, [3, 4, 5])])
def test_best_checkpoint_is_retained_within_save_total_limit(tmp_path, evaluates, greater, best, limit, kept):
    run = CheckpointingRun(tmp_path, greater=greater, limit=limit).go({1: 0.5, 2: 0.9, 3: 0.9, 4: 0.1, 5: 0.4}, evaluates=evaluates)
    assert run.folder.steps() == kept
    assert (run.written["best_global_step"], run.written["best_metric"]) == (best, 0.9 if greater else 0.1)
    assert run.written["best_model_checkpoint"] == str(run.folder.directory(best)) and len(run.said) == 2
    assert run.best.describe() == f"The best checkpoint is {run.folder.directory(best)} (reward {0.9 if greater else 0.1})."


def test_best_checkpoint_uses_metric_of_its_own_step_only(tmp_path):
    run = CheckpointingRun(tmp_path)
    run.best.record(0, {"reward": 9.0})
    for step, told in ((1, {"loss": 0.1}), (2, {"reward": None}), (3, {"reward": float("nan")})):
        run.best.record(step, told)
        run.save(step)
    run.best.record(4, {"reward": 9.0})  # no checkpoint
    run.save(5)
    assert run.best.describe() is None and not (run.folder.path / "best.json").exists()
    run.best.record(5, {"reward": 0.1})
    assert run.best.step == 5


def test_best_checkpoint_after_resume_ignores_abandoned_steps(tmp_path):
    CheckpointingRun(tmp_path, limit=None).go({1: 0.5, 2: 0.3, 3: 0.9})
    later = CheckpointingRun(tmp_path, limit=None)
    later.best.resume(2, is_saved=True)
    assert later.best.step == 1
    later.best.record(3, {"reward": 0.7})
    assert later.best.step == 1  # the checkpoint that is there is of the steps that were given up
    later.save(3)
    assert later.best.step == 3 and later.written["values"] == {"1": 0.5, "2": 0.3, "3": 0.7}


def test_best_checkpoint_after_metric_change_is_searched_again(tmp_path):
    CheckpointingRun(tmp_path).go({1: 0.5})
    other = CheckpointingRun(tmp_path, metric="eval/mean@1")
    other.best.resume(1, is_saved=True)
    assert other.best.step is None and "from now on, the best checkpoint is selected by eval/mean@1" in other.said[0]
    (tmp_path / "checkpoints/best.json").write_text('{"values": {"x": 1}}')
    same = CheckpointingRun(tmp_path)
    same.best.resume(1, is_saved=True)
    assert same.best.step is None
