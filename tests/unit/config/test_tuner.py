"""Tuner settings: parsing, writing and incompatible combinations."""

from __future__ import annotations

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.commands.start.show import print_config
from megatron_grpo.run.config import parse, resolve
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.write import as_yaml
from tests.checked import check
from tests.lora_cases import ODD, write_random_adapter
from tests.tiny_models import write_tiny


def list_problems(*words: str) -> list[str]:
    return [problem.message for problem in validate(parse(words, dialects=lambda: DIALECTS).config)]


def test_rank_pattern_is_read_from_flags_json_and_yaml(tmp_path):
    wanted = {"q_proj": 4, r"layers\.1\.mlp\.down_proj": 6}
    words = ["--tuner_type", "lora", "--rank_pattern"]
    file = tmp_path / "run.yaml"
    file.write_text("tuner:\n  tuner_type: lora\n  rank_pattern:\n    q_proj: 4\n    layers\\.1\\.mlp\\.down_proj: 6\n")
    cfg = resolve([*words, "q_proj=4", r"layers\.1\.mlp\.down_proj=6"])
    assert cfg.tuner.rank_pattern == wanted
    assert resolve([*words, r'{"q_proj": 4, "layers\\.1\\.mlp\\.down_proj": 6}']).tuner.rank_pattern == wanted
    assert resolve(["--config", str(file)]).tuner.rank_pattern == wanted
    file.write_text(as_yaml(cfg))
    assert resolve(["--config", str(file)]).tuner == cfg.tuner


def test_tuner_settings_of_written_config_are_accepted(tmp_path):
    """It names every setting, those of the other tuner at their defaults."""
    for words in ([], ["--tuner_type", "lora"]):
        (tmp_path / "config.yaml").write_text(as_yaml(resolve(words)))
        assert list_problems("--config", str(tmp_path / "config.yaml")) == []


def test_print_config_shows_rank_pattern_in_command_line_form(capsys):
    print_config(resolve(["--rank_pattern", "q_proj=4", "k_proj=2"]))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "rank_pattern" in line]
    assert "q_proj=4 k_proj=2" in row


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lora_rank 8", "lora_rank (8): only supported with tuner_type lora; tuner_type is full."),  # its default, and typed
        (
            "--target_modules q_proj k_proj --use_rslora",
            "use_rslora (true), target_modules (q_proj k_proj): only supported with tuner_type lora",
        ),
        ("--tuner_type lora --trainable_parameters_regex norm", "trainable_parameters_regex (norm): only supported with tuner_type full"),
        ("--tuner_type lora --lora_dtype bfloat16 --torch_dtype float32", "lora_dtype (bfloat16) differs from torch_dtype (float32)"),
        ("--tuner_type lora --target_modules all-linear all-embedding", "vLLM does not sample from adapters on embeddings"),
        ("--tuner_type lora --target_modules mlp.gate", "adapters on mlp.gate are not supported"),
        ("--tuner_type lora --alpha_pattern (=3", "alpha_pattern (() is not a regular expression"),
        ("--trainable_parameters model.norm", "no effect, because no weights are frozen"),
        ("--dialect swift --lora_alpha 32", "lora_alpha (32.0): only supported with tuner_type lora"),
    ],
)
def test_tuner_incompatible_settings_give_one_problem(words, says):
    (message,) = list_problems(*words.split())
    assert says in message


@pytest.mark.parametrize(
    "words",
    [
        "--merge_lora false --use_rslora false --vllm_enable_lora none",
        "--tuner_type lora --lora_dtype bfloat16",
        "--tuner_type lora --ref_adapters there --beta 0.1",
        "--freeze_parameters model --trainable_parameters model.norm",
    ],
)
def test_tuner_compatible_settings_are_accepted(words):
    assert list_problems(*words.split()) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("models") / "qwen3")


def test_tuner_settings_are_taken_from_adapter_config_file(model, tmp_path):
    adapter = write_random_adapter(model, tmp_path / "adapter")
    words = ["--model", str(model), "--max_completion_length", "8", "--tuner_type", "lora", "--adapters", str(adapter)]
    words += ["--target_modules", "all-linear"]
    cfg = check(words).config
    assert (cfg.tuner.lora_rank, cfg.tuner.lora_alpha, cfg.tuner.rank_pattern) == (ODD.rank, ODD.alpha, dict(ODD.rank_pattern))
    assert cfg.sources["lora_rank"] == "derived from adapters"
    (tmp_path / "config.yaml").write_text(as_yaml(cfg))  # without what was derived: no second opinion
    assert check(["--config", str(tmp_path / "config.yaml")]).config.tuner == cfg.tuner
    assert check([*words, "--lora_rank", str(ODD.rank), "--lora_dropout", "0.1"]).config.tuner.lora_dropout == 0.1
