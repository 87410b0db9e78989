"""Rotary frequencies against transformers' own functions, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_grpo.weights.rope import rope_inverse_frequencies
from megatron_grpo.weights.shape import ModelShape
from tests.unit.weights.tiny import CHECKPOINTS, config_of

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "rope_theta": 150000.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "yarn_attention_factor": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 0.7},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "rope_theta": 1e4,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("head_dim", [64, 128, 6])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling, head_dim):
    config = {**config_of("llama"), "head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": SCALINGS[scaling]}
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**config))
    ours, attention_scaling = rope_inverse_frequencies(ModelShape.from_hf(config))
    assert ours.dtype == "float32" and torch.equal(torch.from_numpy(ours), theirs.inv_freq)
    assert attention_scaling == pytest.approx(theirs.attention_scaling, rel=1e-15)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_defaults_of_each_family_are_those_of_transformers(name):
    ours, scaling = rope_inverse_frequencies(ModelShape.from_hf(config_of(name)))
    silent = {key: value for key, value in config_of(name).items() if key not in ("rope_parameters", "rope_theta", "rope_scaling")}
    theta_of_family = AutoConfig.for_model(**silent).rope_parameters["rope_theta"]
    assert ModelShape.from_hf(silent).rope.theta == theta_of_family and scaling == 1.0


def test_latent_attention_rotates_its_own_part_and_sharpens_its_softmax():
    config = {
        **config_of("deepseek_v3"),
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 40.0,
            "rope_theta": 1e4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
    }
    theirs, shape = AutoConfig.for_model(**config), ModelShape.from_hf(config)
    ours, _ = rope_inverse_frequencies(shape)
    assert torch.equal(torch.from_numpy(ours), DeepseekV3RotaryEmbedding(theirs).inv_freq)
    assert shape.mla.softmax_scale == pytest.approx(DeepseekV3Attention(theirs, 0).scaling, rel=1e-12)
