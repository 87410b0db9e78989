"""Each model family and its switches in the real policy: log-probs, gradients and exports against transformers.

tests/distributed/test_logprobs.py has the basic families in all layouts.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import hf_logprobs, load_tiny, write_tiny

KINDS = ["sliding_attention", "full_attention"]
LENGTHS = (5, 9, 2, 40, 9, 1)  # beyond the 16 positions that the stretched ropes began with
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

# name -> (family, settings of write_tiny, layouts of cases.LAYOUTS)
MODELS = {
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}, ["TP2 SP", "PP2 VPP2"]),
    "llama with biases of the attention": ("llama", {"attention_bias": True}, ["TP2"]),
    "llama with biases of the MLP, tied": ("llama", {"mlp_bias": True, "tied": True}, ["PP2"]),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}, ["TP2 SP"]),
    "qwen3_moe with biases": ("qwen3_moe", {"attention_bias": True}, ["EP2"]),
    "qwen3_moe with weights that do not sum to 1": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1]}, ["PP2 VPP2"]),
    "qwen3 tied": ("qwen3", {"tied": True}, ["PP2 VPP2", "TP2 SP"]),
    "mistral": ("mistral", {"sliding_window": None}, ["TP2"]),
    "one key/value head": ("qwen3", {"kv_heads": 1}, ["TP2", "TP4 SP"]),
    "two key/value heads, biases": ("qwen2", {"kv_heads": 2}, ["TP4 SP"]),
    "15 heads in 5 groups": ("qwen3", {"heads": 15, "kv_heads": 5, "head_dim": 6, "hidden": 36, "ffn": 33, "vocab": 131}, ["PP2"]),
    "6 heads in 2 groups": ("llama", {"heads": 6, "kv_heads": 2, "head_dim": 10, "hidden": 36, "ffn": 34, "vocab": 131}, ["TP2 SP"]),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, ["1"]),
    "llama3 rope": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, ["CP2"]),
    "yarn": ("qwen3", {"rope_parameters": YARN}, ["TP2 SP", "CP2"]),
    "deepseek_v3": ("deepseek_v3", {}, ["1", "TP2 SP", "PP2 VPP2", "CP2", "TP2 EP2 ETP1"]),
    "deepseek_v3 with yarn": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}, ["TP2 SP"]),
    "deepseek_v3 with values wider than queries": ("deepseek_v3", {"v_head_dim": 24}, ["TP2 SP"]),
    "glm4_moe": (
        "glm4_moe",
        {"attention_bias": True, "use_qk_norm": True, "experts": 6},
        ["PP2 VPP2", "CP2", "TP2 EP2 ETP1"],
    ),
    "glm4_moe, groups, no norm": (
        "glm4_moe",
        {"n_group": 3, "topk_group": 1, "experts": 6, "kv_heads": 1, "head_dim": 20},
        ["TP2 EP2 ETP1"],
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}, ["1", "PP2 VPP2", "CP2", "TP2 EP2 ETP1"]),
    "glm4_moe_lite, some layers dense": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "first_k_dense_replace": None, "q_lora_rank": None, "n_group": 1},
        ["PP2"],
    ),
    "minimax_m2": ("minimax_m2", {}, ["1", "PP2 VPP2", "CP2", "TP2 EP2 ETP1"]),
    "minimax_m2, a rope with its part": (
        "minimax_m2",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25}, "experts": 6},
        ["TP2 EP2 ETP1"],
    ),
    "qwen2_moe": ("qwen2_moe", {}, ["1", "PP2 VPP2 EP2", "CP2 EP2"]),
    "qwen2_moe, no biases, some windows": (
        "qwen2_moe",
        {
            "qkv_bias": False,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
            "kv_heads": 1,
        },
        ["CP2", "TP2 EP2 ETP1"],
    ),
    "gpt_oss": (
        "gpt_oss",
        {"heads": 6, "kv_heads": 2, "head_dim": 10, "ffn": 36, "experts": 6, "swiglu_limit": 0.6},
        ["PP2 VPP2", "CP2", "TP2 EP2 ETP1"],
    ),
    "olmo2": (
        "olmo2",
        {"heads": 6, "kv_heads": 2, "head_dim": 10, "ffn": 34, "attention_bias": True},
        ["TP2 SP", "PP2 VPP2"],
    ),
    "olmo3": ("olmo3", {}, ["TP2", "CP2"]),
    "gemma3": ("gemma3_text", {"tied": True, "head_dim": 20, "ffn": 66}, ["TP2 SP", "PP2 VPP2", "CP2"]),
    "mistral, windows of 7": ("mistral", {"sliding_window": 7}, ["CP2"]),
    "mistral, some windows (Ministral)": ("mistral", {"sliding_window": 7, "layer_types": KINDS * 2}, ["1"]),
    "norms that add nothing to the mean square": ("qwen3", {"rms_norm_eps": 0.0}, ["1"]),
    "qwen3_next": ("qwen3_next", {"std": 0.06}, ["1", "PP2 VPP2 EP2", "CP2 EP2"]),
    "qwen3_next, no experts": ("qwen3_next", {"std": 0.06, "mlp_only_layers": [0, 1, 2, 3]}, ["TP2 SP"]),
    "qwen3_next, one key/value head": ("qwen3_next", {"std": 0.06, "kv_heads": 1, "mlp_only_layers": [1]}, ["TP2 EP2 ETP1"]),
    "qwen3_5": ("qwen3_5_text", {"std": 0.06}, ["TP2", "TP4 SP", "PP2 VPP2", "CP2", "TP2 SP CP2"]),
    "qwen3_5, tied, biases": ("qwen3_5_text", {"std": 0.06, "tied": True, "attention_bias": True}, ["TP2 SP"]),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"std": 0.06}, ["1", "EP2"]),
    "deepseek_v3 with plain queries": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}, ["TP2 SP"]),
}
CASES = [(model, layout) for model, (_, _, layouts) in MODELS.items() for layout in layouts]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return name -> (checkpoint, sequences, transformers' log-probs, a stored rollout, transformers' step on it in float64)."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def prepare(name: str):
        family, changes, _ = MODELS[name]
        path = write_tiny(folder / name.replace("/", " "), family, **{"layers": 4, "vocab": 125, "std": 0.1, **changes})
        sequences = make_sequences(path)
        batches = cases.stored_rollout(path, vocab=125)
        return path, sequences, compute_expected(path, sequences), batches, cases.reference(path, cases.settings(), batches)

    return prepare


def make_sequences(path) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 125, length + 1).tolist() for length in LENGTHS]


def compute_expected(path, sequences, dtype: str = "float32") -> list[np.ndarray]:
    model = load_tiny(path, dtype)
    return [hf_logprobs(model, tokens).numpy() for tokens in sequences]


def score_as_loaded(policy, path, sequences):
    """Return log-probs of an untrained policy; check that its export equals the checkpoint bit for bit."""
    from megatron_grpo.core.weights.hf_files import HfReader
    from megatron_grpo.core.weights.safetensors_files import stored_names

    read, exported = HfReader(path), dict(policy.named_weights())
    is_stored_otherwise = cases._family(path).fused_experts  # than the table has it: all experts in one tensor
    assert exported.keys() == (set(stored_names(path)) if is_stored_otherwise else read.names)
    assert all(exported[name].dtype == read(name).dtype and torch.equal(exported[name], read(name)) for name in exported)
    return cases.score_tokens(policy, sequences)


def score(rank, world, path, cfg, sequences):
    return score_as_loaded(cases.build(path, cfg, world), path, sequences)


def score_and_train(rank, world, path, cfg, sequences, batches):
    first = []
    trained = cases.train(rank, world, path, cfg, batches, lambda policy: first.append(score_as_loaded(policy, path, sequences)))
    return first[0], trained


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}, {layout}" for name, layout in CASES])
def test_family_logprobs_gradients_and_exports_equal_transformers(prepared, name, layout):
    path, sequences, logprobs, batches, step = prepared(name)
    where = cases.LAYOUTS[layout]
    ranks = run_ranks(score_and_train, where.world_size, path, cases.settings(micro_batch_size=2, **where.settings), sequences, batches)
    for found, trained in ranks:
        assert max(np.abs(a - b).max() for a, b in zip(found, logprobs, strict=True)) < 1e-5
        for name in (name for name in trained.weights if name.endswith("e_score_correction_bias")):
            assert np.array_equal(trained.weights[name], load(path, name)), "it is sampled with, and GRPO gives it no gradient"
        assert cases.distance(trained, step).within()


def load(path, name: str) -> np.ndarray:
    from megatron_grpo.core.weights.hf_files import HfReader

    return HfReader(path)(name).numpy()


LINEAR = {"rope_type": "linear", "factor": 3.0}
# Words of config.json that change no size -> their values; None: they are not there.
READ_AS = {
    "one theta above ropes by kind, Gemma 3": ("gemma3_text", {"rope_parameters": {KINDS[1]: {}, KINDS[0]: {}}, "rope_theta": 300.0}),
    "one theta above ropes by kind, OLMo 3": ("olmo3", {"rope_parameters": {KINDS[1]: LINEAR, KINDS[0]: {}}, "rope_theta": 300.0}),
    "both thetas of Gemma 3": ("gemma3_text", {"rope_parameters": None, "rope_theta": 300.0, "rope_local_base_freq": 50.0}),
    "a stretched rope of Gemma 3, as older versions write it": ("gemma3_text", {"rope_parameters": None, "rope_scaling": LINEAR}),
    "a stretched rope of OLMo 3, as older versions write it": ("olmo3", {"rope_parameters": None, "rope_scaling": LINEAR}),
    "type for rope_type": ("olmo3", {"rope_parameters": {KINDS[1]: {"type": "linear", "factor": 3.0}}}),
    "a rope that says nothing, of gpt-oss": ("gpt_oss", {"rope_parameters": {}}),
    "no rope, of gpt-oss": ("gpt_oss", {"rope_parameters": None}),
    "eps of 0": ("llama", {"rms_norm_eps": 0.0}),
    "a factor of 0 in a gate": ("gpt_oss", {"swiglu_alpha": 0.0}),
    "half of each head, which the family's class says": ("glm4_moe", {"rope_parameters": None}),
    "experts by their other name": ("qwen3_moe", {"num_experts": None, "num_local_experts": 4}),
    "windows that are not used": ("qwen2", {"sliding_window": 3, "max_window_layers": 0}),
    "a dropout of nothing": ("mixtral", {"attention_dropout": 0, "router_jitter_noise": 0.0}),
}


def test_family_config_json_is_read_like_transformers(tmp_path):
    paths, right = {}, {}
    for name, (family, changes) in READ_AS.items():
        paths[name] = write_tiny(tmp_path / name.replace(" ", "_"), family, vocab=125, std=0.15)
        file = paths[name] / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if key not in changes or value is not None}))
        right[name] = compute_expected(paths[name], make_sequences(paths[name]), "float64")

    def body(rank, world):
        parallel = cases.join(cases.settings(), world)
        return {
            name: cases.score_tokens(cases.build(path, cases.settings(), world, parallel), make_sequences(path))
            for name, path in paths.items()
        }

    [found] = run_ranks(body, 1)
    apart = {name: max(float(np.abs(a - b).max()) for a, b in zip(found[name], right[name], strict=True)) for name in READ_AS}
    assert {name: worst for name, worst in apart.items() if not worst < 2e-5} == {}


@pytest.mark.parametrize("rope", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}], ids=lambda rope: rope["rope_type"])
def test_family_old_rope_scaling_keys_equal_new_ones(tmp_path, rope):
    path = write_tiny(tmp_path, "llama", rope_parameters={"rope_theta": 2e4, **rope}, std=0.1)
    sequences = make_sequences(path)
    logprobs = compute_expected(path, sequences)
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    given = config.pop("rope_parameters")
    older = {"rope_theta": given.pop("rope_theta"), "rope_scaling": {"type": given.pop("rope_type"), **given}}
    file.write_text(json.dumps(config | older))
    (found,) = run_ranks(score, 1, path, cases.settings(), sequences)
    assert max(np.abs(a - b).max() for a, b in zip(found, logprobs, strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["qwen3 tied", "deepseek_v3", "llama with all biases"])
def test_family_bfloat16_error_is_that_of_transformers(tmp_path, name):
    family, changes, _ = MODELS[name]
    path = write_tiny(tmp_path, family, layers=4, vocab=125, std=0.1, dtype="bfloat16", **changes)
    sequences = make_sequences(path)
    exact, theirs = (np.concatenate(compute_expected(path, sequences, dtype)) for dtype in ("float32", "bfloat16"))
    cfg = cases.settings(torch_dtype="bfloat16", tensor_model_parallel_size=2, sequence_parallel=True)
    found, _ = run_ranks(score, 2, path, cfg, sequences)
    # Medians: a token that rounding sends to another expert is far off in both.
    assert np.median(np.abs(np.concatenate(found) - exact)) < 1.5 * np.median(np.abs(theirs - exact))


def test_family_bias_without_a_layer_is_an_error(tmp_path):
    path = write_tiny(tmp_path, "llama", attention_bias=True)

    def lose(rank, world):
        from megatron_grpo.core.policy import model_config

        model_config.with_bias = lambda linear, bias: linear
        with pytest.raises(ValueError, match=r"no Megatron module has: .*linear_proj\.bias"):
            cases.build(path, cases.settings(pipeline_model_parallel_size=2), world)

    run_ranks(lose, 2)
