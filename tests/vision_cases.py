"""Vision-language models with a few thousand weights, rows with images of random patches, and transformers' log-probs of them.

Norms and biases are random: at 1 and 0 a wrong name or order would not show. A rollout for `tests/parity_cases` has groups with one image,
two or none, and one that shares its image with another group; some completions contain the image token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.core.types import Sample
from tests import parity_cases as cases
from tests.tiny_models import BOS, EOS, PAD, _write_tokenizer, draw, load_tiny, make_hybrid_config

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
VOCAB, IMAGE, BEGIN, END, VIDEO = 125, 121, 122, 123, 124
MERGE = 2
# The layouts that pictures are shown in. DeepStack wants three layers in the first chunk.
LAYOUTS = {
    **{name: cases.LAYOUTS[name] for name in ("1", "TP2", "TP2 SP", "PP2", "PP2 VPP2", "DP2", "CP2")},
    "EP2": cases.LAYOUTS["EP2"],  # with experts
    **{name: cases.LAYOUTS[name] for name in ("TP2 SP CP2", "TP2 SP PP2", "PP2 CP2", "TP2 SP DP2", "PP2 DP2", "TP4 SP", "CP4")},
    "PP2, 3 and 1": cases.Case(2, {cases.PP: 2, cases.FIRST: 3, cases.LAST: 1}),
}


@dataclasses.dataclass(frozen=True)
class Patches:
    """A `types.Image` that consists of its patches."""

    key: str
    grid: tuple[int, int, int]
    values: np.ndarray
    merge: int = MERGE

    def patches(self) -> np.ndarray:
        return self.values

    @property
    def num_tokens(self) -> int:
        return self.grid[1] * self.grid[2] // self.merge**2


def picture(name: str, rows: int, columns: int, *, side: int = 4) -> Patches:
    """Return an image; rows and columns count patches."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return Patches(name, (1, rows, columns), rng.normal(size=(rows * columns, 3 * 2 * side * side)).astype(np.float32))


def write_vlm(path: str | Path, family: str, *, layers: int = 4, tied: bool = False, dtype: str = "float32") -> Path:
    """Write config, safetensors and tokenizer like transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    path, std = Path(path), 0.06 if family.startswith("qwen3_5") else 0.1  # at 0.1 rounding alone moves a hybrid's gradient by 2e-5
    is_hybrid, interleaved = family.startswith("qwen3_5"), dict(mrope_section=[4, 2, 2], mrope_interleaved=True)
    axes = interleaved if family.startswith("qwen3_vl") or is_hybrid else dict(mrope_section=[2, 3, 3])
    text = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=72, num_hidden_layers=layers, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, pad_token_id=PAD, bos_token_id=BOS,
                eos_token_id=EOS, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1e4, **axes))  # fmt: skip
    vision: dict[str, Any] = dict(depth=3, num_heads=2, patch_size=4, temporal_patch_size=2, spatial_merge_size=MERGE)
    if family == "qwen2_vl":
        vision |= dict(embed_dim=40, hidden_size=64, mlp_ratio=2)
    else:
        vision |= dict(hidden_size=40, intermediate_size=44, out_hidden_size=64)
    if family == "qwen2_5_vl":
        vision |= dict(window_size=16, fullatt_block_indexes=[1])
    if family.startswith("qwen3_vl"):
        vision |= dict(num_position_embeddings=25, deepstack_visual_indexes=[0, 1, 2])
        text["head_dim"] = 16
    if is_hybrid:  # half of each head turns
        vision |= dict(num_position_embeddings=25)
        text |= dict(head_dim=32) | make_hybrid_config(f"{family}_text", 4, 72)
        text["rope_parameters"]["partial_rotary_factor"] = text.pop("partial_rotary_factor")
    if family == "qwen3_vl_moe":
        text |= dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[1], norm_topk_prob=True)
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN,
        vision_end_token_id=END, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_hybrid and "visual" not in name:
                    draw(f"{family}_text", name, parameter, std)
                elif parameter.dim() == 1 and ("norm" in name or "ln_q" in name):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, std)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    if family == "qwen3_vl_moe":
        as_on_the_hub(path)
    _write_tokenizer(path, VOCAB)
    return path


def as_on_the_hub(path: Path) -> None:
    """Transpose the experts of Qwen3-VL to the layout of the Hub and vLLM; transformers 5 writes its own and reads both."""
    from safetensors.torch import load_file, save_file

    held = load_file(path / "model.safetensors")
    turned = {name: tensor.mT.contiguous() if "mlp.experts." in name else tensor for name, tensor in held.items()}
    save_file(turned, path / "model.safetensors", metadata={"format": "pt"})


def compute_logits(model: Any, sample: Any) -> Any:
    """Return [tokens, vocabulary], differentiable. Written out, because transformers' forward treats a sampled image token as an image."""
    import torch

    core, ids = model.model, torch.from_numpy(sample.token_ids)[None]
    embeds, more = core.get_input_embeddings()(ids), {}
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    if sample.images:
        pictures = [one for _, one in sample.images]
        patches = torch.from_numpy(np.concatenate([one.patches() for one in pictures])).to(embeds.dtype)
        grids = torch.tensor([one.grid for one in pictures])
        found = core.get_image_features(patches, grids, return_dict=True)
        is_picture = torch.zeros(ids.shape, dtype=torch.bool)
        for place, one in sample.images:
            is_picture[0, place : place + one.num_tokens] = True
        embeds = embeds.masked_scatter(is_picture[..., None], torch.cat(found.pooler_output).to(embeds.dtype))
        positions, _ = core.get_rope_index(ids, mm_token_type_ids=is_picture.int(), image_grid_thw=grids)
        if deep := getattr(found, "deepstack_features", None):
            deep = [one if torch.is_tensor(one) else torch.cat(one) for one in deep]
            more = {"visual_pos_masks": is_picture, "deepstack_visual_embeds": deep}
    hidden = core.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **more).last_hidden_state
    return model.lm_head(hidden)[0]


def compute_logprobs(model: Any, sample: Any, temperature: float = 1.0) -> np.ndarray:
    """Return float32 [T], 0 where the mask is false."""
    import torch

    with torch.no_grad():
        logits = compute_logits(model, sample).double()[:-1] / temperature
    found = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(sample.token_ids[1:])[:, None])[:, 0].numpy()
    return np.where(sample.mask, np.concatenate([[0.0], found]), 0.0).astype(np.float32)


# (pictures: name, rows and columns of patches), (tokens of each completion)
Group = tuple[tuple[tuple[str, int, int], ...], tuple[int, ...]]
GROUPS: tuple[Group, ...] = (
    ((("a", 4, 6),), (5, 3)),
    ((("b", 2, 10), ("c", 6, 4)), (2, 7)),
    ((), (4, 9)),
    ((("a", 4, 6),), (6, 2)),
)
# Of two data-parallel ranks with one row each, the second has no pictures; then neither has.
APART: tuple[Group, ...] = (
    ((("a", 4, 6),), (5,)),
    ((), (3,)),
    ((("c", 6, 4),), (6,)),
    ((), (4,)),
    ((), (5,)),
    ((), (2,)),
    ((), (6,)),
    ((), (4,)),
)


def rollout(path: str | Path, *, groups: Sequence[Group] = GROUPS, num_steps: int = 1, stale: float = 0.5) -> list[list[Sample]]:
    """Return samples of this many global batches. The second completion of each group contains a sampled image token."""
    model, rng, steps = load_tiny(path), np.random.default_rng(0), []
    for step in range(num_steps):
        samples: list[Sample] = []
        for number, (names, completions) in enumerate(groups):
            tokens, images = rng.integers(4, 100, 2 + number).tolist(), []
            for one in (picture(*name) for name in names):
                tokens.append(BEGIN)
                images.append((len(tokens), one))
                tokens += [IMAGE] * one.num_tokens + [END, *rng.integers(4, 100, 2).tolist()]
            first = len(samples)
            for generation, length in enumerate(completions):
                completion = rng.integers(4, 100, length)
                if generation:
                    completion[length // 2] = IMAGE
                place = (step, len(samples), number)
                samples.append(_sample(rng, model, place, tokens, completion, tuple(images), rng.random() < stale))
            samples[first:] = cases.with_prefix(samples[first:])
        steps.append(samples)
    return steps


def _sample(rng, model, place, prompt, completion, images, is_stale: bool) -> Sample:
    step, row, number = place
    ids = np.concatenate([prompt, completion]).astype(np.int64)
    mask = np.arange(len(ids)) >= len(prompt)

    def noise(scale):
        return np.where(mask, rng.normal(0, scale, len(ids)), 0).astype(np.float32)

    sample = Sample(
        row=row, rollout=step, prompt_number=number, version=step - is_stale, on_policy_version=step - is_stale, token_ids=ids, mask=mask,
        images=images, sampler_logprobs=np.zeros(len(ids), dtype=np.float32),
        advantage=float(rng.uniform(0.5, 1.5) * (-0.4 if row % 3 == 0 else 1.0)), is_zero_std=False, is_truncated=False,
    )  # fmt: skip
    near = compute_logprobs(model, sample, 0.9)
    sample = dataclasses.replace(sample, sampler_logprobs=near + noise(0.1))
    return sample.with_old_logprobs(near + noise(0.3), "recompute") if is_stale else sample


# ---- ways to run the same two steps, in any layout

ALL_TRAINS = dict(freeze_vit=False, freeze_aligner=False)
WAYS: dict[str, dict[str, Any]] = {
    "all trains": ALL_TRAINS,
    "shared, packed": ALL_TRAINS | dict(share_prefix="true", max_tokens_per_micro_batch=96),
    "1 each": ALL_TRAINS | dict(micro_batch_size=1),
    "tower alone": ALL_TRAINS | dict(freeze_llm=True),
    "aligner alone": dict(freeze_llm=True, freeze_aligner=False),
    "tower frozen": {},
    "cispo, reference": ALL_TRAINS | cases.LOSSES["cispo"],
    "frozen, reference": cases.LOSSES["cispo"],
    "recompute full": ALL_TRAINS | dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "recompute selective": ALL_TRAINS | dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]),
    "overlapped": ALL_TRAINS | dict(micro_batch_size=1, overlap_grad_reduce=True),
    "rates": ALL_TRAINS | dict(vit_lr=4e-3, aligner_lr=1e-3),
    "no checkpointing": ALL_TRAINS | dict(vit_gradient_checkpointing=False),
    "LoRA": dict(tuner_type="lora", lora_rank=4),
}
# What the mathematics depend on.
DECIDES = ("freeze_llm", "freeze_vit", "freeze_aligner", "vit_lr", "aligner_lr", "tuner_type", "lora_rank", *cases.LOSSES["cispo"])


def settings(path: str | Path, way: dict[str, Any], layout: dict[str, Any] | None = None) -> Any:
    return cases.settings(**{"model": str(path), "share_prefix": "false", "micro_batch_size": 2} | (layout or {}) | way)


def suits(family: str, layout: str, way: str = "all trains") -> bool:
    if layout == "EP2" and "moe" not in family or layout == "TP2" and "moe" in family:
        return False
    if not family.startswith("qwen3_vl"):
        return layout != "PP2, 3 and 1"
    here = LAYOUTS[layout].settings
    first = here.get(cases.FIRST, 4 // here.get(cases.PP, 1)) // here.get(cases.VPP, 1)
    return first >= 3 and way != "recompute full"


def logprobs_in_float64(path: str | Path, samples: Sequence[Sample]) -> list[np.ndarray]:
    model = load_tiny(path, "float64")
    with cases.float32_means_float64():
        return [compute_logprobs(model, sample, 0.9) for sample in samples]


def far(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))


def score_and_train(rank, world, path, cfg, batches, parallel=None, tamper=None) -> tuple[list[np.ndarray], cases.Trained]:
    """Return (log-probs of the first batch before any step, result of training); checks that the first export equals the checkpoint."""
    import torch

    from megatron_grpo.core.weights.hf_files import HfReader
    from megatron_grpo.core.weights.safetensors_files import stored_names

    found = []

    def before(policy):
        read, exported = HfReader(path), dict(policy.named_weights())
        assert exported.keys() == (set(stored_names(path)) if cases._family(path).fused_experts else read.names)
        assert all(torch.equal(exported[name], read(name)) for name in exported)
        if tamper is not None:
            tamper(policy)
        found.append(policy.scorer.score(batches[0]))

    trained = cases.train(rank, world, path, cfg, batches, before, parallel)
    return found[0], trained


def all_ways(rank, world, path, layout, ways, batches) -> dict[str, Any]:
    """Return `score_and_train` of one setting after another, on the same ranks."""
    parallel = cases.join(settings(path, {}, layout), world)
    return {way: score_and_train(rank, world, path, settings(path, chosen, layout), batches, parallel) for way, chosen in ways.items()}
