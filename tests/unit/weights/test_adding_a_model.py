"""The worked example of docs/adding-a-model.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from megatron_grpo.core.weights import families
from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.names import num_parameters
from megatron_grpo.core.weights.shape import ModelShape
from tests.unit.weights.tiny import BASE

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-model.md"


def test_adding_a_model_example_reads_shards_and_writes_a_model(tmp_path):
    (block,) = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    before = dict(families.FAMILIES)
    try:
        exec(block, {})
        model = transformers.Dots1ForCausalLM(
            transformers.Dots1Config(
                **BASE, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2, first_k_dense_replace=1
            )
        )
        model.save_pretrained(tmp_path)
        reader = HfReader(tmp_path)
        shape = ModelShape.from_hf(reader.config)
        assert num_parameters(shape) == model.num_parameters() + 4 and shape.sliding_window is None
        weights = WeightMap.for_shape(shape, padded_vocab_size=64)
        weights.check_complete(reader.names)
        for name in weights.megatron_names():
            shards = [weights.load(name, reader, tp_rank=rank, tp_size=2, expert_tp_rank=rank, expert_tp_size=2) for rank in range(2)]
            for hf_name, tensor in weights.export(name, shards):
                assert torch.equal(tensor, reader(hf_name))
    finally:
        families.FAMILIES.clear()
        families.FAMILIES.update(before)


def test_adding_a_model_page_names_every_family():
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in families.FAMILIES if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "path",
    sorted(set(re.findall(r"`([\w/]+\.(?:py|json|md))`", PAGE.read_text(encoding="utf-8")))),
)
def test_adding_a_model_page_files_exist(path):
    root = PAGE.parents[1]
    package = root / "megatron_grpo"
    folders = (root, package, package / "core" / "weights")
    assert any((folder / path).is_file() for folder in folders) or path == "config.json"
