"""Rotary frequencies against transformers, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.rope import rope_inverse_frequencies
from megatron_grpo.core.weights.shape import ModelShape
from tests.unit.weights.tiny import CHECKPOINTS, make_model_config

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
def test_rope_frequencies_equal_transformers(scaling, head_dim):
    config = {**make_model_config("llama"), "head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": SCALINGS[scaling]}
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**config))
    ours, attention_scaling = rope_inverse_frequencies(ModelShape.from_hf(config))
    assert ours.dtype == "float32" and torch.equal(torch.from_numpy(ours), theirs.inv_freq)
    assert attention_scaling == pytest.approx(theirs.attention_scaling, rel=1e-15)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rope_defaults_of_each_family_equal_transformers(name):
    ours, scaling = rope_inverse_frequencies(ModelShape.from_hf(make_model_config(name)))
    silent = {key: value for key, value in make_model_config(name).items() if key not in ("rope_parameters", "rope_theta", "rope_scaling")}
    theirs, shape = AutoConfig.for_model(**silent).rope_parameters, ModelShape.from_hf(silent)
    whole, local = theirs.get("full_attention", theirs), theirs.get("sliding_attention", theirs)
    assert (shape.rope.theta, (shape.local_rope or shape.rope).theta) == (whole["rope_theta"], local["rope_theta"])
    assert scaling == pytest.approx(1.0 if name != "gpt_oss" else 0.1 * math.log(32) + 1, rel=1e-15)
    assert shape.rope.dim == shape.head_dim * whole.get("partial_rotary_factor", 1.0) or shape.mla


LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN_OF_SOME = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(("name", "kind", "older"), [
    ("olmo3", Olmo3RotaryEmbedding, {"rope_theta": 5e5, "rope_scaling": YARN_OF_SOME}),
    ("gemma3", Gemma3RotaryEmbedding, {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
])  # fmt: skip
def test_rope_of_sliding_window_layers_is_separate(name, kind, older):
    silent = {key: value for key, value in make_model_config(name).items() if key not in ("rope_parameters", "rope_theta", "rope_scaling")}
    newer = AutoConfig.for_model(**silent, **older)
    for config in ({**silent, **older}, {**silent, "rope_parameters": newer.rope_parameters}):
        theirs, shape = kind(newer), ModelShape.from_hf(config)
        for rope, layers in ((shape.rope, "full_attention"), (shape.local_rope, "sliding_attention")):
            ours, scaling = rope_inverse_frequencies(shape, rope)
            assert torch.equal(torch.from_numpy(ours), getattr(theirs, f"{layers}_inv_freq"))
            assert scaling == pytest.approx(getattr(theirs, f"{layers}_attention_scaling"), rel=1e-15)


@pytest.mark.parametrize(("name", "said", "words"), [
    ("olmo3", {"rope_theta": 1e4}, "transformers versions read a value other than 500000 differently"),
    ("gemma3", {"rope_parameters": {"rope_type": "yarn"}}, "must have full_attention and sliding_attention,"),
    ("glm4_moe", {"rope_parameters": {**YARN_OF_SOME, "partial_rotary_factor": 0.5}}, "'yarn' with partial_rotary_factor 0.5 is not"),
    ("glm4_moe", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2}}, "factor must be at most 1, got 2"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": "many"}}}, "theta must be a positive number"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported"),
    ("gemma3", {"layer_types": ["full_attention"] * 3}, "for each of 4 layers"),
    ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types must name full_attention or sliding_attention"),
])  # fmt: skip
def test_rope_config_with_unsupported_layers_is_rejected(name, said, words):
    config = {key: value for key, value in make_model_config(name).items() if key != "rope_parameters"}
    with pytest.raises(ConfigError, match=words):
        ModelShape.from_hf({**config, **said})


def test_rope_of_latent_attention_equals_transformers():
    config = {
        **make_model_config("deepseek_v3"),
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
