"""Make the tables of docs/models.md and README.md: what each architecture supports, and which test covers it.

`python tools/docs.py write` writes them. The architectures come from the loader's table; the tests' own lists name the models they cover.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_grpo.core.weights.families import FAMILIES

MODELS = {  # names that the authors of the models use
    "LlamaForCausalLM": "Llama 2, 3",
    "MistralForCausalLM": "Mistral, Ministral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "Qwen3MoeForCausalLM": "Qwen3 with experts",
    "MixtralForCausalLM": "Mixtral",
    "DeepseekV3ForCausalLM": "DeepSeek-V3",
    "Glm4MoeForCausalLM": "GLM-4.5, 4.6, 4.7",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "MiniMaxM2ForCausalLM": "MiniMax-M2 (weights in bfloat16)",
    "GptOssForCausalLM": "gpt-oss (weights in bfloat16)",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5, 3.6, 3.8 (text)",
    "Qwen3_5MoeForCausalLM": "Qwen3.5, 3.6, 3.8 with experts (text)",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL with experts",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5, 3.6, 3.8",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5, 3.6, 3.8 with experts",
}


def find_tests() -> dict[str, dict[str, list[str]]]:
    """Return the architectures that each test covers: {column of the table: {test: architectures}}."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    from tests.distributed import (
        test_bitwise_parity,
        test_families,
        test_image_rollouts,
        test_logprobs,
        test_lora,
        test_vision,
        test_weight_sync,
    )

    text = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "gemma3_text": "Gemma3ForCausalLM"}

    def get_architectures(families: Iterable[str], architectures: Mapping[str, str] = text) -> list[str]:
        return [architectures[family] for family in families]

    def get_vision_architectures(families: Iterable[str]) -> list[str]:
        return get_architectures(families, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

    return {
        "full": {
            "test_logprobs": get_architectures(test_logprobs.FAMILIES),
            "test_families": get_architectures(family for family, *_ in test_families.MODELS.values()),
            "test_vision": get_vision_architectures(family for family, *_ in test_vision.CASES),
        },
        "lora": {
            "test_lora": get_architectures(test_lora.MODELS[model]["family"] for model in test_lora.TESTED),
            "test_vision": get_vision_architectures(test_vision.WITH_ADAPTERS),
        },
        "sampled": {
            "test_weight_sync": get_architectures(name.partition("-")[0] for name in test_weight_sync.MODELS),
            "test_bitwise_parity": get_architectures(test_bitwise_parity.DENSE),
            "test_image_rollouts": get_vision_architectures(test_image_rollouts.KINDS),
        },
    }


def make_table() -> str:
    """Return the table of docs/models.md."""
    found = find_tests()

    def cell(column: str, architecture: str) -> str:
        return ", ".join(f"`{test}`" for test, architectures in found[column].items() if architecture in architectures)

    lines = ["| Models | Architecture | Full | LoRA | Images | Sampled on a CPU |", "|---|---|---|---|---|---|"]
    for name, family in FAMILIES.items():
        lora = "attention only" if family.fused_experts else "yes"
        by = cell("lora", name)
        cells = (MODELS[name], f"`{name}`", cell("full", name), f"{lora}, {by}" if by else lora, "yes" if family.tower else "-")
        lines.append(f"| {' | '.join((*cells, cell('sampled', name) or '-'))} |")
    return "\n".join(lines)


def make_summary() -> str:
    """Return the table of README.md; architectures with equal support share a row."""
    found = find_tests()
    trained, sampled = ({name for names in found[column].values() for name in names} for column in ("full", "sampled"))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, family in FAMILIES.items():
        verified = " and ".join(["training"] * (name in trained) + ["sampling"] * (name in sampled))
        can = ("yes", "attention only" if family.fused_experts else "yes", "yes" if family.tower else "-", verified)
        rows.setdefault(can, []).append(MODELS[name].removesuffix(" (weights in bfloat16)"))
    lines = ["| Models | Full | LoRA | Images | Verified on CPU | Verified on GPU |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {' | '.join(can)} | not yet |" for can, names in rows.items())])
