"""Safetensors read and written: sharded or not, fused experts, atomic, and loadable by transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.base.files import MARK
from megatron_grpo.core.weights.hf_files import HfReader, check_tied_head
from megatron_grpo.core.weights.names import hf_shapes
from megatron_grpo.core.weights.shape import ModelShape, read_config
from megatron_grpo.run.hf_writer import HfWriter
from tests.unit.weights.tiny import write_checkpoint
from tests.vision_cases import as_on_the_hub, write_vlm


def copy_weights(reader: HfReader, out, source, **options) -> None:
    with HfWriter(out, source, **options) as write:
        for name in sorted(reader.names):
            write(name, reader(name))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_stored_in_one_tensor_are_read_under_their_hub_names(tmp_path, name):
    apart = HfReader(write_checkpoint(name, tmp_path / "apart"))
    fused = HfReader(write_checkpoint(name, tmp_path / "fused", save_original_format=False))
    assert any("gate_up_proj" in stored for stored in load_file(tmp_path / "fused" / "model.safetensors"))
    assert fused.names == apart.names == hf_shapes(ModelShape.from_hf(fused.config)).keys()
    assert all(torch.equal(fused(tensor), apart(tensor)) for tensor in apart.names)


def test_experts_that_transformers_5_stores_as_in_memory_are_refused(tmp_path):
    path = write_vlm(tmp_path, "qwen3_vl_moe")
    HfReader(path)
    as_on_the_hub(path)  # once more: as `save_pretrained` had stored them
    with pytest.raises(
        ConfigError, match=r"gate_up_proj has shape \(6, 40, 64\).*Files on the Hub, and vLLM, have \(6, 64, 40\)|down_proj has"
    ):
        HfReader(path)


def test_hf_reader_of_sharded_checkpoint_equals_single_file(tmp_path):
    single = HfReader(write_checkpoint("qwen3", tmp_path / "single"))
    sharded = HfReader(write_checkpoint("qwen3", tmp_path / "sharded", max_shard_size="20KB"))
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    assert single.names == sharded.names
    assert all(torch.equal(single(name), sharded(name)) for name in single.names)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_hf_writer_checkpoint_loads_in_transformers_with_equal_weights(tmp_path, name, max_shard_bytes):
    source = write_checkpoint(name, tmp_path / "source")
    copy_weights(HfReader(source), tmp_path / "out", source, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (max_shard_bytes == 20_000)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    original = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert all(torch.equal(tensor, original[key]) for key, tensor in theirs.state_dict().items())


def test_dtype_is_converted_and_declared_and_a_routing_bias_stays_float32(tmp_path):
    source = write_checkpoint("deepseek_v3", tmp_path / "source")
    copy_weights(HfReader(source), tmp_path / "out", source, dtype=torch.bfloat16)
    out = HfReader(tmp_path / "out")
    assert out.config["dtype"] == "bfloat16" and out.config["num_nextn_predict_layers"] == 0
    kinds = {name: out(name).dtype for name in out.names}
    assert kinds.pop("model.layers.1.mlp.gate.e_score_correction_bias") is torch.float32
    assert set(kinds.values()) == {torch.bfloat16}


def test_prediction_layers_are_not_in_the_exported_config(tmp_path):
    """A reader would look for their weights, which are neither trained nor written."""
    source = write_vlm(tmp_path / "source", "qwen3_5")
    config = read_config(source)
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    copy_weights(HfReader(source), tmp_path / "out", source)
    assert read_config(tmp_path / "out")["text_config"]["mtp_num_hidden_layers"] == 0


def test_hf_writer_keeps_torch_dtype_key_of_old_config(tmp_path):
    source = write_checkpoint("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    copy_weights(HfReader(source), tmp_path / "out", source, dtype=torch.bfloat16)
    written = HfReader(tmp_path / "out").config
    assert written["torch_dtype"] == "bfloat16" and "dtype" not in written


def test_hf_writer_copies_companion_files_without_other_weights(tmp_path):
    source = write_checkpoint("llama", tmp_path / "source")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "README.md",
    ):
        (source / name).write_text("{}")
    copy_weights(HfReader(source), tmp_path / "out", source)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        MARK,
    }


def test_hf_writer_failure_keeps_earlier_checkpoint(tmp_path):
    source = write_checkpoint("llama", tmp_path / "source")
    reader, out = HfReader(source), tmp_path / "out"
    copy_weights(reader, out, source)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(KeyboardInterrupt), HfWriter(out, source) as write:
        write("model.norm.weight", torch.zeros(32))
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="20 tensors missing"), HfWriter(out, source, expected=reader.names) as write:
        write("model.norm.weight", torch.zeros(32))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_hf_writer_does_not_replace_other_directories(tmp_path):
    source = write_checkpoint("llama", tmp_path / "source")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match="not overwritten"):
        copy_weights(HfReader(source), tmp_path / "home", source)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


def test_hf_writer_copies_tensors_at_call(tmp_path):
    source = write_checkpoint("llama", tmp_path / "source")
    live = torch.ones(4, 6)
    with HfWriter(tmp_path / "out", source) as write:
        write("a", live[:2])
        write("b", live[2:])
        live.zero_()
    assert all(tensor.eq(1).all() for tensor in load_file(tmp_path / "out" / "model.safetensors").values())


def test_hf_reader_of_invalid_checkpoint_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        HfReader(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no config.json"):
        HfReader(tmp_path / "empty")
    source = write_checkpoint("llama", tmp_path / "source", max_shard_size="20KB")
    with pytest.raises(ConfigError, match="has no tensor lm_head.bias"):
        HfReader(source)("lm_head.bias")
    first, second, *_ = sorted(source.glob("model-*.safetensors"))
    whole = second.read_bytes()
    for damaged in (whole[:100], whole[:-1], b"<html>" + whole, b""):
        second.write_bytes(damaged)
        with pytest.raises(ConfigError, match=f"{second.name} .*is damaged or was not downloaded completely"):
            HfReader(source)
    first.unlink()
    with pytest.raises(ConfigError, match=f"are missing: {first.name}"):
        HfReader(source)
    for path in source.glob("model*"):
        path.unlink()
    save_file({}, source / "consolidated.safetensors")
    shutil.copy(source / "config.json", source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="neither model.safetensors nor .*pytorch_model.bin: convert it"):
        HfReader(source)


def write_checkpoint_with_head(tmp_path, name: str, change):
    """The tiny checkpoint `name` with lm_head.weight = change(embedding) in its file."""
    path = write_checkpoint(name, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = change(weights["model.embed_tokens.weight"]).clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_check_tied_head_rejects_different_head(tmp_path):
    def moved(embedding):
        return torch.cat([embedding[:3], embedding[3:] + 0.25])

    path = write_checkpoint_with_head(tmp_path, "llama_tied", moved)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight), "transformers uses the head that is there"
    with pytest.raises(ConfigError, match="tie_word_embeddings.*50 of 53 rows differ, by up to 0.25.*to false.*or remove lm_head.weight"):
        check_tied_head(HfReader(path))
    with pytest.raises(ConfigError, match=r"their shapes are \(60, 32\) and \(53, 32\)"):
        check_tied_head(HfReader(write_checkpoint_with_head(tmp_path / "longer", "llama_tied", lambda embedding: torch.zeros(60, 32))))


def test_tied_head_of_family_default_rejects_different_head(tmp_path):
    path = write_checkpoint_with_head(tmp_path, "gemma3", lambda embedding: -embedding)
    config = json.loads((path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="explicitly or by the family's default"):
        check_tied_head(HfReader(path))


@pytest.mark.parametrize(("name", "change"), [("llama_tied", lambda w: w), ("qwen2", lambda w: -w)])
def test_check_tied_head_accepts_copy_of_embedding_and_untied_head(tmp_path, name, change):
    check_tied_head(HfReader(write_checkpoint_with_head(tmp_path, name, change)))


def test_policy_with_different_tied_head_is_rejected(tmp_path):
    from tests import parity_cases as cases
    from tests.ranks import run_ranks

    path = write_checkpoint_with_head(tmp_path, "qwen2_tied", lambda embedding: 2 * embedding)

    def body(rank, world):
        with pytest.raises(ConfigError, match="53 of 53 rows differ"):
            cases.build(path, cases.settings(), world)

    run_ranks(body, 1)
