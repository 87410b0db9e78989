"""Vision-language models in `plan`: rejected with the messages of tests/refusals.yaml, or planned with the size of the vision tower."""

from __future__ import annotations

import json
import re

import pytest

from megatron_grpo.cli import main
from tests import vision_cases as vision
from tests.checked import check
from tests.unit.test_composition import COMMON, MODELS, REFUSALS
from tests.unit.weights.test_vision import QWEN2_5_VL_7B, QWEN3_VL_4B

ROWS = [tuple(row.values()) for row in REFUSALS["vision"]]
PREPROCESSOR = dict(
    image_processor_type="Qwen2VLImageProcessor", patch_size=4, temporal_patch_size=2, merge_size=2, do_resize=True, do_rescale=True,
    do_normalize=True, rescale_factor=1 / 255, do_convert_rgb=True, resample=3, size=dict(shortest_edge=64, longest_edge=4096),
    image_mean=[0.5, 0.5, 0.5], image_std=[0.3, 0.3, 0.3],
)  # fmt: skip
CONFIGS = {
    "Qwen2.5-VL": QWEN2_5_VL_7B,
    "Qwen3-VL": QWEN3_VL_4B,
    "Qwen3 8B": {"architectures": ["Qwen3ForCausalLM"], **COMMON, **MODELS["Qwen3ForCausalLM"]},
}


@pytest.fixture
def ask(tmp_path, capsys):
    def ask(model: str, words: str) -> tuple[int, dict]:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(CONFIGS[model]))
        sizes = {"--world_size": 8, "--micro_batch_size": 2, "--global_batch_size": 64, "--num_generations": 4}
        typed = [word for name, value in sizes.items() if name not in words for word in (name, str(value))]
        code = main(["plan", "--json", *typed, "--model", str(config), *words.split()])
        return code, json.loads(capsys.readouterr().out)

    return ask


@pytest.mark.parametrize(("model", "words", "sentence"), ROWS, ids=[f"{model} {words}" for model, words, _ in ROWS])
def test_vision_composition_rejected_gives_its_message(ask, model, words, sentence):
    code, found = ask(model, words)
    assert code == 2 and [error["message"] for error in found["errors"]] == [sentence]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Qwen3-VL", "--recompute_granularity selective"),
        ("Qwen3-VL", "--pipeline_model_parallel_size 4 --virtual_pipeline_model_parallel_size 3"),
        ("Qwen2.5-VL", "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"),
        ("Qwen2.5-VL", "--freeze_llm true --freeze_aligner false --aligner_lr 1e-5"),
        ("Qwen2.5-VL", "--freeze_llm true --trainable_parameters model.norm"),
        ("Qwen2.5-VL", "--trainable_parameters visual.merger."),
        ("Qwen2.5-VL", "--tuner_type lora --freeze_vit true"),
        ("Qwen3 8B", "--freeze_vit true --freeze_aligner true --freeze_llm false"),
    ],
)
def test_vision_composition_supported_is_planned(ask, model, words):
    assert ask(model, words)[0] == 0


def test_plan_counts_vision_tower_on_first_stage(ask):
    words = "--pipeline_model_parallel_size 2 --max_prompt_length 4096 --max_completion_length 1024 --micro_batch_size 1"
    numbers = 676_550_144
    memory = {}
    for name, chosen in {"frozen": "", "trained": "--freeze_vit false --freeze_aligner false"}.items():
        code, found = ask("Qwen2.5-VL", f"{words} {chosen}")
        assert code == 0
        memory[name] = found["memory"]
        tower, (first, last) = found["memory"]["tower"], found["memory"]["stages"]
        assert tower["parameters"] == numbers and tower["patches_per_micro_batch"] == 4 * 4096
        # Embedding and head weigh alike, and the last stage has a norm: what is left is the tower.
        assert first["num_parameters"] - last["num_parameters"] == numbers - 3584
    frozen, trained = memory["frozen"]["tower"], memory["trained"]["tower"]
    assert frozen["trainable_parameters"] == 0 and trained["trainable_parameters"] == numbers
    assert frozen["static_bytes"] == 2 * numbers and frozen["activations_bytes"] < trained["activations_bytes"] / 2
    assert frozen["outweighs"]["layers"] < trained["outweighs"]["layers"] and trained["outweighs"]["first"] < 14


def test_plan_text_shows_vision_tower(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN2_5_VL_7B))
    sizes = "--world_size 8 --micro_batch_size 1 --global_batch_size 64 --num_generations 4 --pipeline_model_parallel_size 2".split()
    assert main(["plan", *sizes, "--model", str(config), "--max_prompt_length", "4096", "--freeze_vit", "false"]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "vision tower, on stage 0: 0.68 B parameters (0.63 B train)" in said
    assert re.search(r"equivalent to [\d.]+ layers: stages are most balanced with decoder_first_pipeline_num_layers \d+ \(now 14\)", said)


def test_weight_sync_omits_frozen_vision_tower(ask):
    pushed = {
        words: ask("Qwen2.5-VL", words)[1]["cost"]["weight_push_bytes"]
        for words in ("--sleep_level 1", "--sleep_level 2", "--sleep_level 1 --freeze_aligner false")
    }
    whole = 2 * 8_292_166_656
    assert list(pushed.values()) == [whole - 2 * 676_550_144, whole, whole]


def test_plan_warns_of_vision_tower_without_gradient(tmp_path, capsys):
    path = vision.write_vlm(tmp_path / "model", "qwen2_5_vl")
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "5 6 7"}\n' * 8)
    said = {}
    for freezes in ("true", "false"):
        sizes = "--global_batch_size 8 --num_generations 4 --micro_batch_size 4 --max_completion_length 64"
        words = f"--model {path} --dataset {data} --freeze_aligner {freezes} {sizes}"
        assert main(["plan", "--json", *words.split()]) == 0
        said[freezes] = [line for line in json.loads(capsys.readouterr().out)["warnings"] if "has an image" in line]
    assert said["true"] == [] and len(said["false"]) == 1
    assert "the vision tower (freeze_aligner false) is not trained" in said["false"][0]


@pytest.mark.parametrize(
    ("dialect", "model", "words", "is_frozen"),
    [
        *((dialect, "Qwen2.5-VL", "", False) for dialect in ("trl", "skyrl", "verl", "slime")),
        *((dialect, "Qwen3 8B", "", True) for dialect in ("trl", "skyrl", "verl", "slime")),
        ("swift", "Qwen2.5-VL", "", True),
        ("trl", "Qwen2.5-VL", "--freeze_vit true --freeze_aligner true", True),
        ("trl", "Qwen2.5-VL", "--use_peft", True),
        ("verl", "Qwen2.5-VL", "--actor.freeze_vision_tower true", True),
        ("skyrl", "Qwen2.5-VL", "--trainer.policy.language_model_only true", True),
        ("verl", "Qwen3 8B", "--data.image_key images", True),
        ("skyrl", "Qwen3 8B", "--generator.vision_language_generator true", True),
    ],
)
def test_vision_tower_is_trained_as_in_framework_script(tmp_path, dialect, model, words, is_frozen):
    """Unless somebody says otherwise, and of a model that has one."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[model]))
    group = {"verl": "--rollout.n 4", "slime": "--rollout_batch_size 32 --n_samples_per_prompt 8 --colocate"}.get(dialect, "")
    argv = ["--dialect", dialect, "--world_size", "8", "--model", str(config), *group.split(), *words.split()]
    checked = check(argv)
    assert (checked.config.tuner.freeze_vit, checked.config.tuner.freeze_aligner) == (is_frozen, is_frozen)
    told = [row.used for row in checked.parsed.defaults if row.name == "freeze_vit"]
    assert told == ([] if is_frozen else ["false"])
    unknown = check([*argv, "--model", "nobody/has-this"]) if not words else None
    if unknown and dialect != "swift":
        assert [row.used for row in unknown.parsed.defaults if row.name == "freeze_vit"] == ["false (vision-language model)"]
