"""The `plan` command: its JSON object against a naive walk, errors, framework files, the figure and its run time."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.cli import main
from megatron_grpo.core.weights.families import NOT_YET, NOT_YET_BY_NAME
from megatron_grpo.run.models import read_shape

QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"],
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
)


def run_plan(capsys, *argv) -> tuple[int, dict]:
    code = main(["plan", "--json", *map(str, argv)])
    return code, json.loads(capsys.readouterr().out)


def run_native_plan(capsys, *argv) -> dict:
    code, found = run_plan(capsys, *argv)
    assert code == 0, found
    return found


def test_plan_json_has_the_documented_keys(capsys):
    found = run_native_plan(
        capsys,
        *(
            "--world_size 4 --tensor_model_parallel_size 2 --micro_batch_size 2 --global_batch_size 8 "
            "--num_generations 4 --steps_per_generation 2"
        ).split(),
    )
    assert list(found) == ["parallel", "batch", "old_logprobs", "timetable", "pipeline", "memory", "cost", "native_flags", "warnings"]
    assert found["parallel"] == {
        "world_size": 4,
        "tp": 2,
        "pp": 1,
        "vpp": None,
        "cp": 1,
        "ep": 1,
        "etp": 1,
        "dp_size": 2,
        "expert_dp_size": 4,
    }
    assert found["batch"] == {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "global_batch_size": 8,
        "steps_per_generation": 2,
        "generation_batch_size": 16,
        "num_generations": 4,
        "num_iterations": 1,
        "num_rollout_prompts": 4,
        "num_train_prompts": 2,
        "num_prompts_per_dp_group": 1,
    }
    assert found["old_logprobs"] == {"rollouts": [True, True], "slices_recomputed": 4, "slices_total": 8}
    assert found["timetable"][2] == {
        "micro_step": 2,
        "optimizer_step": 1,
        "rollout": 0,
        "pass": 0,
        "slice": 2,
        "sampled_by_version": 0,
        "trained_at_version": 1,
        "staleness": 1,
        "old_logprobs": "recompute",
        "rows": [[8, 10], [10, 12]],
        "prompts": [[2], [2]],
    }
    assert found["memory"] is None and found["cost"] is None and found["pipeline"] == {"bubble_fraction": 0.0}


def walk_timetable(batch: dict, parallel: dict, num_rollouts: int, old_logprobs: str):
    """Rows of the timetable by counting: sample, train, step."""
    dp, mbs, a = parallel["dp_size"], batch["micro_batch_size"], batch["gradient_accumulation_steps"]
    version = done = number = next_prompt = 0
    for rollout in range(num_rollouts):
        sampled, seen = version, set()
        prompts = [next_prompt + row // batch["num_generations"] for row in range(batch["generation_batch_size"])]
        next_prompt = prompts[-1] + 1
        for index in range(batch["num_iterations"]):
            rows = list(range(batch["generation_batch_size"]))
            j = 0
            while rows:
                shares = []
                for _ in range(dp):
                    shares.append(rows[:mbs])
                    rows = rows[mbs:]
                if version == sampled:
                    label = "on_policy"
                else:
                    label = "rollout" if old_logprobs == "rollout" else "cached" if j in seen else "recompute"
                seen.add(j)
                yield {
                    "micro_step": number,
                    "optimizer_step": version,
                    "rollout": rollout,
                    "pass": index,
                    "slice": j,
                    "sampled_by_version": sampled,
                    "trained_at_version": version,
                    "staleness": version - sampled,
                    "old_logprobs": label,
                    "rows": [[share[0], share[-1] + 1] for share in shares],
                    "prompts": [sorted({prompts[row] for row in share}) for share in shares],
                }
                j, number, done = j + 1, number + 1, done + 1
                if done == a:
                    version, done = version + 1, 0


@settings(max_examples=120)
@given(
    dp=st.integers(1, 4),
    mbs=st.integers(1, 6),
    a=st.integers(1, 5),
    w=st.integers(1, 6),
    mu=st.integers(1, 3),
    count=st.integers(1, 5),
    group=st.sampled_from([2, 3, 4, 6]),
    old=st.sampled_from(["auto", "rollout"]),
)
def test_plan_timetable_equals_naive_walk(dp, mbs, a, w, mu, count, group, old):
    from megatron_grpo.commands.planning.summary import plan_object
    from megatron_grpo.core.batching.batch_sizes import BatchSizes
    from megatron_grpo.core.batching.schedule import TrainingSchedule
    from megatron_grpo.core.parallel.layout import Layout

    sizes = BatchSizes(
        layout=Layout(world_size=dp),
        micro_batch_size=mbs,
        global_batch_size=a * mbs * dp,
        generation_batch_size=group * w * mbs * dp,
        num_generations=group,
        num_iterations=mu,
        old_logprobs=old,
    )
    found = json.loads(json.dumps(plan_object(TrainingSchedule(sizes), count)))
    expected = list(walk_timetable(found["batch"], found["parallel"], count, old))
    assert found["timetable"] == expected
    stale = [any(row["staleness"] for row in expected if row["rollout"] == r) for r in range(count)]
    assert found["old_logprobs"]["rollouts"] == stale
    assert found["old_logprobs"]["slices_recomputed"] == sum(row["old_logprobs"] == "recompute" for row in expected)
    assert found["old_logprobs"]["slices_total"] == sum(row["pass"] == 0 for row in expected)


def test_plan_json_reports_errors_as_object(capsys):
    code, found = run_plan(capsys, "--global_batch_size", 64, "--generation_batch_size", 96, "--dialecct", "x", "--seed", "y")
    assert code == 2
    assert [set(error) for error in found["errors"]] == [{"flags", "message", "nearest"}] * 3
    assert [error["flags"] for error in found["errors"]] == [["dialecct"], ["seed"], ["generation_batch_size", "global_batch_size"]]
    assert found["errors"][0]["nearest"] == {} and "dialect" in found["errors"][0]["message"]


def test_plan_native_flags_give_the_same_plan(capsys):
    import shlex

    for argv in (
        (
            "--dialect trl --num_processes 3 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 "
            "--steps_per_generation 6 --num_generations 4 --num_iterations 2"
        ).split(),
        ["--dialect", "skyrl", "--world_size", 8],
        ["--world_size", 8, "--pipeline_model_parallel_size", 2, "--virtual_pipeline_model_parallel_size", 2, "--stop", "a b", "c"],
    ):
        there = run_native_plan(capsys, *argv)
        here = run_native_plan(capsys, *shlex.split(there["native_flags"]))
        assert all(there[part] == here[part] for part in ("parallel", "batch", "old_logprobs", "timetable", "native_flags"))


@pytest.mark.parametrize(
    ("argv", "batch"),
    [
        (["--dialect", "skyrl", "--world_size", 4], dict(global_batch_size=1280, gradient_accumulation_steps=320, steps_per_generation=4)),
        (
            ["--dialect", "skyrl-doc", "--world_size", 4],
            dict(global_batch_size=256, gradient_accumulation_steps=64, steps_per_generation=20),
        ),
        (["--dialect", "skyrl-doc", "--world_size", 4, "--micro_train_batch_size_per_gpu", 8], dict(gradient_accumulation_steps=8)),
        (["--dialect", "trl", "--num_processes", 2], dict(micro_batch_size=8, global_batch_size=16, generation_batch_size=16)),
        (
            ["--dialect", "trl", "--gradient_accumulation_steps", 4, "--steps_per_generation", 8],
            dict(global_batch_size=32, generation_batch_size=64, steps_per_generation=2),
        ),
        (
            ["--dialect", "trl", "--gradient_accumulation_steps", 4, "--generation_batch_size", 24],
            dict(generation_batch_size=24, steps_per_generation=0.75),
        ),
        (
            ["--dialect", "cs336", "--train_batch_size", 256, "--gradient_accumulation_steps", 128, "--n_grpo_steps", 200],
            dict(micro_batch_size=2, global_batch_size=256, num_generations=8),
        ),
    ],
)
def test_plan_reads_sizes_as_each_framework(capsys, argv, batch):
    found = run_native_plan(capsys, *argv)
    assert {name: found["batch"][name] for name in batch} == batch
    assert "optimizer step" in found["warnings"][0] and found["warnings"][0].startswith("Your old setup took")


def test_plan_translates_framework_files_and_lists_settings_without_effect(capsys, tmp_path):
    trl = tmp_path / "grpo.yaml"
    trl.write_text(
        "model_name_or_path: /nowhere/x\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nnum_generations: 4\n"
        "learning_rate: 1.0e-6\ngradient_checkpointing: true\nmax_steps: -1\nvllm_importance_sampling_mode: token_truncate\n"
        "eval_steps: 100\n"
    )
    found = run_native_plan(capsys, "--dialect", "trl", "--config", trl, "--num_processes", 2)
    assert found["batch"]["generation_batch_size"] == 16
    assert any("eval_steps (100) has no effect" in warning for warning in found["warnings"])
    for flags in ("--lr 1e-06", "--rollout_importance_sampling_mode token_truncate", "--recompute_granularity full", "--loss_type dapo"):
        assert flags in found["native_flags"]
    assert "max_steps" not in found["native_flags"]
    skyrl = tmp_path / "skyrl.yaml"
    skyrl.write_text(
        "trainer:\n  train_batch_size: 64\n  policy_mini_batch_size: 32\n  placement: {colocate_all: true}\n"
        "generator: {n_samples_per_prompt: 4}\ndata: {train_data: [x]}\n"
    )
    found = run_native_plan(capsys, "--dialect", "skyrl", "--config", skyrl, "--world_size", 4, "trainer.policy_mini_batch_size=16")
    assert (found["batch"]["generation_batch_size"], found["batch"]["global_batch_size"]) == (256, 64)
    assert any("trainer.placement.colocate_all" in warning and "ignored settings" in warning for warning in found["warnings"])


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--num_generations", 4, "--global_batch_size", 6, "--steps_per_generation", 2], "group is split over optimizer steps"),
        (["--steps_per_generation", 2], "only clipping corrects"),
        (["--steps_per_generation", 2, "--old_logprobs", "rollout"], "without a correction"),
        (["--world_size", 8], "6 of 8 ranks are idle while sampling"),
        (["--world_size", 4, "--pipeline_model_parallel_size", 4, "--micro_batch_size", 4], "The pipeline bubble is 43%"),
        (["--dialect", "swift", "--world_size", 16], "Megatron-SWIFT rejects this configuration"),
        (["--dialect", "swift", "--micro_batch_size", 2, "--num_generations", 16], "Megatron-SWIFT rejects this configuration"),
        (
            ["--dialect", "swift", "--micro_batch_size", 4, "--global_batch_size", 16, "--steps_per_generation", 2],
            "Note: the Megatron-SWIFT guide",
        ),
        (["--max_steps", 1], "ends after 1 optimizer step"),
        (["--dialect", "swift-megatron"], "beta defaults to 0.0 here and to 0.04 there; 0.04 is used"),
        (["--max_steps", 9, "--num_train_epochs", 1], "num_train_epochs (1) is ignored"),
        (["--max_steps", 9, "--beta", 0.1, "--sync_ref_model", "true"], "(512) exceeds the 9 optimizer steps of the run"),
    ],
)
def test_plan_warns_of_legal_but_unlikely_settings(capsys, argv, part):
    assert any(part in warning for warning in run_native_plan(capsys, *argv)["warnings"])


def test_plan_of_plain_config_has_no_warnings(capsys):
    assert run_native_plan(capsys, "--world_size", 2)["warnings"] == []


def test_plan_run_length_is_computed_from_dataset(capsys, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "x"}\n' * 5)
    main(["plan", "--dataset", str(data), "--num_train_epochs", "2"])
    assert "optimizer steps, 5 rollouts over 5 prompts" in capsys.readouterr().out


def print_figure(*argv, width="80", **env) -> str:
    import os

    ran = subprocess.run(
        [sys.executable, "-m", "megatron_grpo", "plan", *map(str, argv)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": width, **env},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_figure_fits_80_columns_and_is_plain_when_piped(tmp_path):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(QWEN3_8B))
    for argv in (
        ["--world_size", 4000, "--micro_batch_size", 3, "--global_batch_size", 24000, "--plan_rollouts", 50],
        ["--dialect", "skyrl", "--world_size", 4, "--model", model, "--gpu_memory_gb", 80],
        ["--steps_per_generation", 4],
    ):
        text = print_figure(*argv)
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 80
        assert len(text.splitlines()) < 170


@pytest.mark.parametrize(
    "sizes",
    [
        "",
        "--steps_per_generation 2",
        "--num_iterations 2",
        "--micro_batch_size 4 --generation_batch_size 24 --allow_unaligned_generation true",
    ],
)
@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_plan_warns_if_old_logprobs_rollout_has_no_effect(capsys, sizes, max_steps):
    """A run of one optimizer step has no stale row, whatever its sizes; which rows are stale is read off the timetable itself."""
    argv = [*sizes.split(), "--old_logprobs", "rollout", "--max_steps", max_steps, "--global_batch_size", 16, "--plan_rollouts", 9]
    found = run_native_plan(capsys, *argv)
    stale = [row["staleness"] for row in found["timetable"] if row["optimizer_step"] < max_steps and row["staleness"]]
    assert any("old_logprobs rollout has no effect" in warning for warning in found["warnings"]) == (not stale)
    assert any("uses the sampler's log-probs for stale rows" in warning for warning in found["warnings"]) == bool(stale)


def test_the_figure_marks_stale_rows_and_brackets_steps_and_rollouts():
    text = print_figure(
        *(
            "--world_size 2 --micro_batch_size 2 --gradient_accumulation_steps 4 --generation_batch_size 12 "
            "--num_generations 2 --allow_unaligned_generation --plan_rollouts 3"
        ).split()
    )
    rows = [line.split() for line in text.splitlines()]
    assert ["┌", "step", "0", "0", "0", "1", "·", "on_policy", "┐", "rollout", "0", "by", "v0"] in rows
    assert ["┌", "step", "1", "4", "8", "9", "+1", "recompute", "│"] in rows
    assert ["forward-only", "3", "of", "12", "slices;", "2", "of", "4", "rollouts", "are", "stale:", "1,", "2"] in rows
    assert "stale     optimizer steps between sampling and training" in text


def test_plan_figure_has_colors_in_a_terminal():
    assert "\x1b[" in print_figure("--steps_per_generation", 2, FORCE_COLOR="1")


def test_plan_png_writes_the_figure(tmp_path, capsys):
    assert main(["plan", "--json", "--world_size", "40", "--global_batch_size", "80", "--png", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    code, found = run_plan(capsys, "--png", tmp_path / "plan.docx")
    assert code == 2 and found["errors"][0]["flags"] == ["png"]


def test_plan_of_1000_ranks_takes_less_than_a_second(tmp_path):
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # once, as where it is installed
    compiled["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def cpu(*argv) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (tmp_path / "out.json").open("w") as out:
            subprocess.run([sys.executable, "-m", "megatron_grpo", *map(str, argv)], stdout=out, check=True, env=compiled)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    size = ["--world_size", 1000, "--micro_batch_size", 3, "--global_batch_size", 6000, "--steps_per_generation", 2, "--plan_rollouts", 100]
    cpu("plan", "--json", "--plan_rollouts", 1)
    assert cpu("plan", "--json", *size) < 1.0
    assert len(json.loads((tmp_path / "out.json").read_text())["timetable"]) == 400
    assert cpu("--help") < 0.3 and cpu("train", "--help") < 0.3


def test_plan_errors_for_large_sizes_are_found_quickly(capsys):
    begin = time.process_time()
    code, found = run_plan(capsys, "--world_size", 99_991, "--global_batch_size", 999_999, "--generation_batch_size", 1_000_003)
    assert code == 2 and time.process_time() - begin < 1.0


def test_repository_has_no_torch_on_the_way_to_a_plan_with_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    code = (
        "import sys; from megatron_grpo.cli import main; "
        f"main(['plan', '--json', '--model', {str(tmp_path)!r}, '--gpu_memory_gb', '80']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'megatron', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[3]).returncode == 0


@pytest.mark.parametrize(("some", "told"), [(2000, "100 %"), (1999, "100 %"), (11, "0.55 %")])
def test_plan_trainable_share_is_printed_with_readable_precision(some, told):
    from megatron_grpo.commands.planning.report import trainable

    assert told in trainable({"trainable_parameters": some, "parameters": 2000})


def test_plan_warns_of_warm_up_as_long_as_the_run(capsys):
    said = "The learning rate never reaches lr"
    assert main(["plan", "--max_steps", "4", "--lr_warmup_iters", "4"]) == 0
    assert f"{said} (1e-06): the warm-up takes 4 optimizer steps, and the run has 4." in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--max_steps", "5", "--lr_warmup_iters", "4"]) == 0
    assert said not in " ".join(capsys.readouterr().out.split())


def test_plan_prints_to_an_ascii_terminal(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["plan", "--run_name", "Z\u00fcrich"]) == 0
    stream.flush()
    assert b"training schedule" in stream.buffer.getvalue()


@pytest.mark.parametrize("flag", ["model", "dataset", "output_dir", "lengths", "resume", "png", "reward_funcs"])
def test_plan_with_too_long_path_exits_2(capsys, flag):
    assert main(["plan", f"--{flag}", "./" + "a" * 300 + (".py:f" if flag == "reward_funcs" else "")]) == 2
    told = capsys.readouterr().err
    assert "it contains a name longer than 255 bytes" in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("zai-org/GLM-5", True),
        ("Qwen/Qwen3.6-35B-A3B", False),
        ("Qwen/Qwen3.8-Flash-Next", True),
        ("google/gemma-2-9b", True),
        ("Qwen/Qwen3-8B", False),
        ("me/gemma-2-9", False),
    ],
)
def test_plan_rejects_unsupported_hub_model_by_name_before_download(name, is_known):
    shape, problems = read_shape(name)
    assert shape is None
    assert ["is not supported: " in problem.message for problem in problems] == [True] * is_known


def test_names_on_the_hub_are_of_architectures_that_have_a_reason():
    assert set(NOT_YET_BY_NAME.values()) <= set(NOT_YET)


@pytest.mark.parametrize("architectures", [{}, {"architectures": None}], ids=["none", "null"])
def test_model_config_with_model_type_only_is_accepted(tmp_path, architectures):
    written = {**QWEN3_8B, "model_type": "qwen3"}
    del written["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(written | architectures))
    shape, problems = read_shape(str(tmp_path))
    assert shape is not None and shape.architecture == "Qwen3ForCausalLM" and not problems
