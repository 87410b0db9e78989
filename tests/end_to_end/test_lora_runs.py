"""Complete LoRA runs: resumed in each layout, rejected with another adapter, exported from their checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import lora_cases
from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks
from tests.small_hub import LocalHub, use

# Rollouts that straddle steps, two passes: rows and old log-probs wait in the checkpoint. KL to the model without the adapter.
SIZES = "--num_generations 2 --global_batch_size 8 --micro_batch_size 2 --allow_unaligned_generation true --generation_batch_size 12"
OTHERS = "--num_iterations 2 --lr 2e-3 --adam_eps 1e-5 --clip_grad 0.5 --beta 0.1 --max_steps 5 --save_steps 1 --save_total_limit 5"
LORA = "--tuner_type lora --lora_rank 4 --rank_pattern v_proj=3 down_proj=6 --exclude_modules o_proj"
TP2, PP2 = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"], ["--pipeline_model_parallel_size", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(output_dir, flags) of an uninterrupted run on two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("lora")
    flags = [*write_inputs(folder), *f"{SIZES} {OTHERS} {LORA} --log_completions_steps 0".split()]
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(folder / "out")]) == [0, 0]
    return folder / "out", flags


def adapter(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize(("step", "layout"), [(2, []), (3, TP2), (1, PP2)], ids=["dp2", "tp2", "pp2"])
def test_lora_run_resumes_in_each_layout(whole, tmp_path, step, layout):
    out, flags = whole
    start = ["--resume", str(out / "checkpoints" / f"iter_{step:07d}"), "--output_dir", str(tmp_path)]
    assert run_ranks(scripted.train, 2, [*flags, *layout, *start]) == [0, 0]
    expected, found = read_jsonl(out / "metrics.jsonl")[step:], read_jsonl(tmp_path / "metrics.jsonl")
    tolerance = 2e-5 if layout else 0.0
    for one, other in zip(expected, found, strict=True):
        for name in ("loss", "grad_norm", "kl"):
            assert other[name] == pytest.approx(one[name], rel=tolerance, abs=tolerance), name
    for name, wanted in adapter(out / "hf").items():
        assert np.linalg.norm(adapter(tmp_path / "hf")[name] - wanted) <= 5 * tolerance * np.linalg.norm(wanted), name


def capture_output(rank: int, world_size: int, flags: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        return scripted.train(rank, world_size, flags), text.getvalue()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--lora_rank", "8"], "lora_rank is 8, but was 4"),
        (["--lora_alpha", "16"], "the same matrices would be a different adapter"),
        (["--tuner_type", "full", "--lora_rank", "8"], "tuner_type"),
        (["--target_modules", "q_proj"], "target_modules"),
    ],
)
def test_lora_run_resume_with_another_adapter_is_an_error(whole, changes, says):
    out, flags = whole
    [(code, text)] = run_ranks(capture_output, 1, [*flags, *changes, "--output_dir", str(out), "--max_steps", "9"])
    assert code == 2 and says in text


def test_lora_run_from_adapter_resumes_only_with_that_adapter(whole, tmp_path):
    out, flags = whole
    plain = [*flags[: flags.index("--tuner_type")], "--log_completions_steps", "0"]
    started = lora_cases.write_random_adapter(flags[flags.index("--model") + 1], tmp_path / "start")
    run = [*plain, "--tuner_type", "lora", "--adapters", str(started), "--output_dir", str(tmp_path / "out")]
    assert run_ranks(scripted.train, 1, [*run, "--max_steps", "1"]) == [0]
    before, after = adapter(started), adapter(tmp_path / "out" / "hf")
    assert before.keys() == after.keys() and all(0 < np.linalg.norm(after[name] - before[name]) for name in before)
    assert json.loads((started / "adapter_config.json").read_text()) == json.loads((tmp_path / "out/hf/adapter_config.json").read_text())
    assert run_ranks(scripted.train, 1, [*run, "--max_steps", "2"]) == [0]
    shutil.rmtree(started)
    lora_cases.write_random_adapter(flags[flags.index("--model") + 1], started, seed=2)
    [(code, text)] = run_ranks(capture_output, 1, [*run, "--max_steps", "3"])
    assert code == 2 and "The adapters" in text and "is not the one of" in text


def export(rank: int, world_size: int, words: list[str]) -> tuple[int, str]:
    from megatron_grpo.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as text, contextlib.redirect_stdout(text):
        return main(["export", *words]), text.getvalue()


def test_lora_checkpoint_exports_in_each_layout(whole, tmp_path):
    out, flags = whole
    newest = ["--resume", str(out / "checkpoints" / "iter_0000005")]
    right = adapter(out / "hf")
    for number, layout in enumerate(([], TP2, PP2)):
        ranks = 2 if layout else 1
        target = tmp_path / str(number)
        found = run_ranks(export, ranks, [*newest, *layout, "--output_dir", str(target)])
        assert [code for code, _ in found] == [0] * ranks, found
        assert f"Done: {target} (the adapter)" in found[0][1]
        assert right.keys() == adapter(target).keys() and all(np.array_equal(right[name], adapter(target)[name]) for name in right)
    found = run_ranks(export, 2, [*newest, *TP2, "--output_dir", str(tmp_path / "of_ranks"), "--merge_lora", "true"])
    assert found[0][0] == 0 and f"Done: {tmp_path}/of_ranks (the merged model)" in found[0][1]
    files = ["--model", flags[flags.index("--model") + 1], "--adapters", str(out / "hf"), "--merge_lora", "true"]
    assert run_ranks(export, 1, [*files, "--output_dir", str(tmp_path / "merged")])[0][0] == 0
    one, other = load_file(tmp_path / "merged" / "model.safetensors"), load_file(tmp_path / "of_ranks" / "model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "of_ranks", "merged"}, "nothing beside what was named"
    assert one.keys() == other.keys() and all(np.allclose(one[name], other[name], atol=1e-7) for name in one)


def export_and_push(rank: int, world_size: int, words: list[str], address: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, address)
        return export(rank, world_size, [*words, "--push_to_hub", "true"])


def test_export_refused_by_hub_is_kept_and_prints_the_push_command(whole, tmp_path):
    hub, target = LocalHub(refuses=503), tmp_path / "out"
    words = ["--resume", str(whole[0] / "checkpoints" / "iter_0000003"), "--output_dir", str(target)]
    found = run_ranks(export_and_push, 2, words, hub.address)
    hub.close()
    assert [code for code, _ in found] == [1, 0] and f"hf upload me/out {target} ." in found[0][1]
    card = (target / "README.md").read_text()
    assert (target / "adapter_model.safetensors").is_file() and "library_name: peft" in card and "| optimizer steps | 3 |" in card
    assert "beta: 0.1" in card, "as the run that trained it had it"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "export needs --output_dir"),
        (["--output_dir", "OUT"], "export needs --resume CHECKPOINT"),
        (["--output_dir", "OUT", "--resume", "OUT"], "manifest.json is missing"),
        (
            ["--output_dir", "BASE", "--resume", "CKPT"],
            "holds config.json, which is not from an export of this program; it is not overwritten",
        ),
        (["--output_dir", "OUT", "--resume", "CKPT", "--tensor_model_parallel_size", "2"], "Start a multiple of 2"),
        (["--output_dir", "OUT", "--resume", "CKPT", "--tensor_model_parallel_size", "3"], "tensor_model_parallel_size"),
    ],
)
def test_export_of_unsupported_checkpoint_is_an_error(whole, tmp_path, words, says):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    places = {"OUT": str(tmp_path / "new"), "BASE": str(tmp_path / "base"), "CKPT": str(whole[0] / "checkpoints" / "iter_0000005")}
    [(code, text)] = run_ranks(export, 1, [places.get(word, word) for word in words])
    assert code == 2 and says in text and not (tmp_path / "new").exists()


def test_export_of_damaged_checkpoint_is_an_error(whole, tmp_path):
    copy = Path(shutil.copytree(whole[0] / "checkpoints" / "iter_0000004", tmp_path / "iter_0000004"))
    file = next(copy.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    [(code, text)] = run_ranks(export, 1, ["--resume", str(copy), "--output_dir", str(tmp_path / "out")])
    assert code == 2 and "is damaged" in text and not (tmp_path / "out").exists()
