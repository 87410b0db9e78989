"""Arguments of `mismatch`: all problems are reported together before anything loads."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.commands.analysis.args import read_mismatch_args
from megatron_grpo.commands.analysis.mismatch import evenly_spaced, read_sampled_rows
from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.rollout.engine import WeightSyncError, make_completion
from megatron_grpo.core.trainer.weight_sync import WeightSyncManager
from megatron_grpo.core.types import Completion, Group, Prompt, TokenSequence
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.write import write_config
from megatron_grpo.run.metrics.rollout import token_columns
from megatron_grpo.run.metrics.summary import LogpDifferenceMonitor

read = partial(read_mismatch_args, parse=partial(parse, dialects=lambda: DIALECTS))


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ([], ["mismatch needs a directory first"]),
        (["--row", "1"], ["mismatch needs a directory first"]),
        (["/nowhere"], ["/nowhere does not exist"]),
        (
            ["/nowhere", "--row", "-1", "--rows=0"],
            ["row (-1) must be a whole number, 0 or more", "rows (0) must be a whole number, 1 or more", "exist"],
        ),
        (["/nowhere", "--row"], ["row (nothing) must be a whole number"]),
        (["/nowhere", "--dtype", "float8"], ["torch_dtype", "float8", "bfloat16", "float32"]),
        (["/nowhere", "--rowz", "3"], ["rowz"]),
    ],
)
def test_mismatch_args_with_several_errors_report_all(words, sentences):
    with pytest.raises(ConfigError) as error:
        read(words)
    for sentence in sentences:
        assert sentence in str(error.value)


def test_mismatch_args_with_unknown_folder_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run \(metrics.jsonl\), checkpoint \(manifest.json\) or model \(config.json\)"):
        read([str(tmp_path)])


def test_mismatch_args_for_run_without_checkpoint_use_initial_model_and_flags(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="neither a checkpoint nor a config.yaml"):
        read([str(tmp_path)])
    cfg = parse(["--model", "somewhere", "--temperature", "0.7", "--tensor_model_parallel_size", "4", "--torch_dtype", "bfloat16"]).config
    write_config(cfg, tmp_path / "config.yaml")
    asked = read([str(tmp_path), "--dtype", "float32", "--row", "3"])
    subject = asked
    assert (asked.row, asked.num_rows, asked.dtype) == (3, 16, "float32")
    assert (subject.run, subject.checkpoint, subject.step) == (tmp_path, None, 0)
    assert (subject.cfg.model.model, subject.cfg.rollout.temperature, subject.cfg.model.torch_dtype) == ("somewhere", 0.7, "float32")
    assert subject.cfg.parallel.tensor_model_parallel_size == 1  # the command has a layout of its own


def test_mismatch_args_accept_a_model_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    subject = read([str(tmp_path)])
    assert (subject.run, subject.checkpoint, subject.cfg.model.model) == (None, None, str(tmp_path))


def completion(length: int) -> Completion:
    return make_completion((5, 6, 7), tuple(range(10, 10 + length)), [-0.5] * length, text="", finish_reason="stop", version=4)


def test_tokens_and_log_probs_are_recorded_and_read_back(tmp_path):
    import pyarrow
    import pyarrow.parquet

    ids = np.arange(6)
    twice = Completion(sequence=TokenSequence(token_ids=ids, mask=ids > 3, starts=(0, 3)), logprobs=-np.ones(6, dtype=np.float32), text="",
                       versions=((4, 4, 6),), finish_reason="stop")  # fmt: skip
    prompt = Prompt(number=0, row=0, raw="", token_ids=(5, 6, 7), columns={})
    group = Group(prompt=prompt, completions=(completion(2), twice, completion(5)))
    (tmp_path / "completions").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.table({"version": [4, 4, 4], **token_columns(group)}), tmp_path / "completions" / "step_000004.parquet"
    )
    rows = read_sampled_rows(tmp_path, version=4)
    assert [row.tokens.tolist() for row in rows] == [[5, 6, 7, 10, 11], [5, 6, 7, 10, 11, 12, 13, 14]]  # that of two contexts is left out
    assert rows[0].sampler.tolist()[3:] == [-0.5, -0.5] and rows[0].is_sampled.tolist() == [False, False, False, True, True]
    assert rows[0].prompt == (5, 6, 7)
    assert read_sampled_rows(tmp_path, version=3) == [] and len(read_sampled_rows(tmp_path)) == 2
    assert [row.sampler.size for row in evenly_spaced(rows * 8, 4)] == [5, 5, 5, 5] and len(evenly_spaced(rows, 4)) == 2


def test_sampled_rows_without_token_columns_are_empty(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "completions").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"version": [0], "completion": ["x"]}), tmp_path / "completions" / "step_000000.parquet")
    assert read_sampled_rows(tmp_path) == []


def test_drift_warning_and_sync_error_name_the_mismatch_command():
    drift = LogpDifferenceMonitor(bound=1.0, dtype="float32", hint="To see: megatron-grpo mismatch out")
    assert drift.warning({"sampling/sampling_logp_difference/max": 2.0}).endswith(
        "their weights or their arithmetic differ. To see: megatron-grpo mismatch out"
    )

    def refuses():
        raise WeightSyncError("the engine is wrong")

    holder = SimpleNamespace(prepare=refuses, version=0)
    with pytest.raises(WeightSyncError, match="the engine is wrong\nTo see: megatron-grpo mismatch out"):
        WeightSyncManager(None, holder, verify=True, hint="To see: megatron-grpo mismatch out").sync_weights(1)
