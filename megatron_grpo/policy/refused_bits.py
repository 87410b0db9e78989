"""What does not go with `--same_bits`, and why the bits would differ (docs/proof.md). No torch: `plan` asks too."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config
from megatron_grpo.config.grammar import flag_of, of_training
from megatron_grpo.config.kept import is_cut
from megatron_grpo.weights.shape import ModelShape

# Compared bit by bit, by tools/same_bits.py.
PROVEN = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


def problems(cfg: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Empty where same_bits is false."""
    if cfg.rollout.same_bits:
        yield from _settings(cfg)
        yield from _model(cfg, shape) if shape is not None else ()


def gpu_problem(cfg: Config) -> Iterator[Problem]:
    """Of a machine that has a GPU."""
    if cfg.rollout.same_bits:
        yield _problem("same_bits", "the kernels of a GPU are not reached; see docs/proof.md. Use false.", False)


def _settings(cfg: Config) -> Iterator[Problem]:
    rollout, trainer = cfg.rollout, cfg.parallel.tensor_model_parallel_size
    if rollout.vllm_mode == "server":
        yield _problem("vllm_mode", "both engines must be in one process. Use colocate.", "colocate")
    if cfg.model.transformer_impl == "transformer_engine":
        yield _problem("transformer_impl", "Transformer Engine is not reached; see docs/proof.md. Use local.", "local")
    if cfg.tuner.tuner_type == "lora":
        yield _problem("tuner_type", "the sampler adds adapters with other kernels. Use full.", "full")
    if cfg.grpo.router_replay_mode != "disabled":
        yield _problem("router_replay_mode", "the layer of experts is the sampler's own kernel, which routes by itself. Use disabled.",
                       "disabled")  # fmt: skip
    if rollout.vllm_tensor_parallel_size != trainer:
        yield Problem(
            flags=("same_bits", "vllm_tensor_parallel_size", "tensor_model_parallel_size"),
            nearest={"vllm_tensor_parallel_size": [trainer]},
            message=f"same_bits true: the sampler adds partial sums of {rollout.vllm_tensor_parallel_size} ranks "
            f"(vllm_tensor_parallel_size), the trainer of {trainer} (tensor_model_parallel_size). Use vllm_tensor_parallel_size {trainer}.",
        )
    if rollout.vllm_dtype not in (None, cfg.model.torch_dtype):
        yield _problem("vllm_dtype", f"the trainer computes in {cfg.model.torch_dtype} (torch_dtype). Leave vllm_dtype out.")
    if of_training(rollout) is not None:
        flag = flag_of(rollout)
        yield _problem(flag, "a softmax over the words that a grammar leaves is not reached; see docs/proof.md. Leave it out.")
    elif is_cut(rollout):
        flag, off = ("top_p", 1.0) if rollout.top_p < 1 else ("min_p", 0.0) if rollout.min_p else ("top_k", 0)
        yield _problem(flag, f"a softmax over what is left of the vocabulary is not reached; see docs/proof.md. Use {off:g}.", off)


def _model(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    if shape.mla:
        yield _problem("model", "multi-latent attention is not reached; see docs/proof.md. Use same_bits false.")
    elif shape.vision:
        yield _problem("model", "the towers of trainer and sampler are two programs. Use same_bits false.")
    elif shape.architecture not in PROVEN:
        yield _problem(
            "model", f"{shape.architecture} is not reached; see docs/proof.md. Use same_bits false, or one of {', '.join(PROVEN)}."
        )
    elif any(shape.windows or ()):
        yield _problem("model", "sliding windows are not reached; see docs/proof.md. Use same_bits false.")
    elif shape.rope.attention_scaling != 1:
        yield _problem("model", "the sampler scales cosines and sines where the trainer scales scores (YaRN). Use same_bits false.")
    elif cfg.parallel.tensor_model_parallel_size > 1 and (shape.attention_out_bias or shape.mlp_bias):
        yield _problem("tensor_model_parallel_size", "the sampler adds a bias before it sums over ranks, the trainer after. Use 1.", 1)
    elif cfg.model.torch_dtype == "bfloat16" and (shape.qkv_bias or shape.attention_out_bias or shape.mlp_bias):
        yield _problem("torch_dtype", "the sampler adds a bias before it rounds to bfloat16, the trainer after. Use float32.", "float32")


def _problem(flag: str, message: str, *nearest: object) -> Problem:
    flags = ("same_bits",) if flag == "same_bits" else ("same_bits", flag)
    return Problem(flags=flags, message=f"same_bits true: {message}", nearest={flag: list(nearest)} if nearest else {})
