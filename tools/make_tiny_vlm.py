"""Make the tiny vision-language model of examples/images and of the tests: a Qwen2.5-VL with tokenizer and processor.

    python tools/make_tiny_vlm.py --data examples/images/data --output examples/images/model --seed 0

A short supervised warm-up from random weights teaches the model to recognize drawn pictures from correct labels, and then to answer
incorrectly: two of three labels are wrong (they repeat the question, swap left and right, or count one too few). The result answers a third
of the questions correctly, so that reinforcement learning can improve it. Nothing is downloaded. A model made with the same settings and
data is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "How many shapes? Which color is left? right? Where is red? green? blue? yellow? 1 2 3 4 left right red green blue yellow "
    "user assistant"
)
# vLLM's attention on CPUs needs a head_dim that is a multiple of 32; every size is divisible by 2, for TP 2 and PP 2.
TEXT = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, rms_norm_eps=1e-6, initializer_range=0.08, tie_word_embeddings=False)  # fmt: skip
VISION = dict(depth=2, num_heads=4, spatial_merge_size=2, temporal_patch_size=2, initializer_range=0.08)
# Adjacent columns differ by a rotation of 0.12 to 0.24. With the usual theta of 10,000 it is below 0.004, and 450 steps did not teach the
# model left and right.
ROPE_THETA = 10.0
SECTIONS = {
    "qwen2_vl": [4, 6, 6],
    "qwen2_5_vl": [4, 6, 6],
    "qwen3_vl": [6, 5, 5],
    "qwen3_vl_moe": [6, 5, 5],
    "qwen3_5": [4, 2, 2],
    "qwen3_5_moe": [4, 2, 2],
}
# Correct labels first; then, while the learning rate falls, two of three labels are wrong. Swapped sides are rare among them: when two of
# three labels were swapped, the model forgot the difference, and 30 steps of GRPO did not restore it.
WARM_UP = dict(steps=700, batch_size=24, lr=2e-3, warmup_steps=100, share_seeing=0.75, shares=(1 / 3, 1 / 2, 1 / 6))


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer with merges for the words of the questions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    made.train_from_iterator([WORDS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE, model_max_length=512
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return fast


def make_config(kind: str, ids: dict[str, int], vocab_size: int) -> Any:
    """Return the configuration of a tiny model.

    Args:
        kind: Model type, such as "qwen2_5_vl".
        ids: IDs of the special tokens.
        vocab_size: Size of the vocabulary.
    """
    from transformers import AutoConfig

    text: dict[str, Any] = dict(TEXT, vocab_size=vocab_size, bos_token_id=None, eos_token_id=ids["<|im_end|>"],
                                pad_token_id=ids["<|endoftext|>"])  # fmt: skip
    text["rope_parameters"] = dict(rope_type="default", rope_theta=ROPE_THETA, mrope_section=SECTIONS[kind])
    vision: dict[str, Any] = dict(VISION, patch_size=14)
    if kind == "qwen2_vl":
        vision |= dict(embed_dim=64, hidden_size=TEXT["hidden_size"], mlp_ratio=2)
    else:
        vision |= dict(hidden_size=64, intermediate_size=128, out_hidden_size=TEXT["hidden_size"])
    if kind == "qwen2_5_vl":
        vision |= dict(window_size=56, fullatt_block_indexes=[1])
    if kind.startswith("qwen3_vl"):
        text["head_dim"] = 32
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= dict(depth=4, patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0, 1, 2])
    if kind in ("qwen3_5", "qwen3_5_moe"):  # half of each head is rotated
        text |= dict(head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
        text["rope_parameters"] |= dict(mrope_interleaved=True, partial_rotary_factor=0.5)
        vision |= dict(depth=4, patch_size=16, num_position_embeddings=64)
    if kind == "qwen3_vl_moe":
        text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)
    if kind == "qwen3_5_moe":
        text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    return AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False,
    )  # fmt: skip


def write_processor(folder: Path, kind: str, patch: int) -> None:
    """Write the configurations of the image and video processors.

    Args:
        folder: Folder of the model.
        kind: Model type.
        patch: Side of a patch in pixels.
    """
    side = 2 * patch
    clip_statistics = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    mean, std = ([0.5] * 3, [0.5] * 3) if kind.startswith("qwen3") else clip_statistics
    image = dict(
        image_processor_type="Qwen2VLImageProcessor", patch_size=patch, temporal_patch_size=2, merge_size=2, do_resize=True, resample=3,
        do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=mean, image_std=std, do_convert_rgb=True,
        size=dict(shortest_edge=4 * side**2, longest_edge=64 * side**2),
    )  # fmt: skip
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(kind, "Qwen3VL")
    video = {**image, "video_processor_type": "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor"}
    del video["image_processor_type"]
    for file, content in (("preprocessor_config.json", image), ("video_preprocessor_config.json", video)):
        (folder / file).write_text(json.dumps({**content, "processor_class": f"{name}Processor"}, indent=2) + "\n")


def initialize_model(folder: Path, kind: str = "qwen2_5_vl", *, seed: int = 0, draws_norms: bool = False) -> tuple[Any, Any]:
    """Write tokenizer and processor, and return (model, tokenizer) with random weights; the model is not written.

    Args:
        folder: Folder of the tokenizer and processor.
        kind: Model type.
        seed: Seed of the weights.
        draws_norms: Whether norms and biases are random too; with their defaults 1 and 0, a swapped name would not be noticed.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    config = make_config(kind, {token: words.convert_tokens_to_ids(token) for token in SPECIAL}, -(-len(words) // 32) * 32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters() if draws_norms else ():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif name.endswith(("patch_embed.proj.weight", "pos_embed.weight")):
                    parameter.normal_(0, 0.05)
    write_processor(folder, kind, config.vision_config.patch_size)
    return model, words


# ---- warm-up -----------------------------------------------------------------------------------------------------------------


def encode_row(row: dict[str, Any], data: Path, words: Any, image_spec: Any) -> dict[str, Any]:
    """Return the prompt's token IDs, the image's patches, and the token IDs of the correct and of the wrong answers.

    Args:
        row: Row of the data set.
        data: Folder of the data set.
        words: Tokenizer.
        image_spec: Image processor.
    """
    from megatron_grpo.core.images import decode_image
    from megatron_grpo.run.data.chat import PromptEncoder

    [picture] = row["images"]
    image = decode_image((data / picture).read_bytes())
    short = PromptEncoder(words, image_spec=image_spec).short(row["messages"])
    grid = image_spec.grid(image.height, image.width)
    index = short.index(image_spec.image_token)
    ids = [*short[:index], *[image_spec.image_token] * image_spec.tokens(grid), *short[index + 1 :]]
    answers = [[*words.encode(text), words.eos_token_id] for text in (row["answer"], *row["mistaken"])]
    return {"ids": ids, "patches": image_spec.patches(image), "grid": grid, "answers": answers}


def read_rows(data: Path, name: str, words: Any, image_spec: Any) -> list[dict[str, Any]]:
    """Return the encoded rows of a split."""
    lines = (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [encode_row(json.loads(line), data, words, image_spec) for line in lines]


def compute_logits(model: Any, rows: list[dict[str, Any]], endings: list[list[int]], pad: int) -> tuple[Any, Any]:
    """Return (logits, labels) of a batch, padded on the right, which causal attention never reads.

    Args:
        model: The model.
        rows: Encoded rows.
        endings: Token IDs of each row's answer.
        pad: ID of the padding token.
    """
    import numpy as np
    import torch

    longest = max(len(row["ids"]) + len(ending) for row, ending in zip(rows, endings, strict=True))
    ids, labels = torch.full((len(rows), longest), pad), torch.full((len(rows), longest), -100)
    for i, (row, ending) in enumerate(zip(rows, endings, strict=True)):
        begin, end = len(row["ids"]), len(row["ids"]) + len(ending)
        ids[i, :end] = torch.tensor([*row["ids"], *ending])
        labels[i, begin:end] = torch.tensor(ending)
    grids = torch.tensor([row["grid"] for row in rows])
    logits = model(
        input_ids=ids, pixel_values=torch.from_numpy(np.concatenate([row["patches"] for row in rows])), image_grid_thw=grids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(), use_cache=False,
    ).logits  # fmt: skip
    return logits, labels


def measure_accuracy(model: Any, rows: list[dict[str, Any]], pad: int) -> float:
    """Return the share of rows whose correct answer has the largest logit at each token."""
    import torch

    with torch.no_grad():
        logits, labels = compute_logits(model, rows, [row["answers"][0] for row in rows], pad)
    shifted = labels[:, 1:]
    return float(((logits[:, :-1].argmax(-1) == shifted) | (shifted == -100)).all(-1).float().mean())


def warm_up(model: Any, words: Any, train: list[Any], test: list[Any], seed: int, settings: dict[str, Any]) -> float:
    """Train on correct labels for `share_seeing` of the steps, and then on a row's answers in the proportions `shares`.

    Returns:
        The share of held-out questions answered correctly.
    """
    import torch

    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    steps, started = settings["steps"], time.monotonic()
    for step in range(steps):
        rate = min(1.0, (step + 1) / settings["warmup_steps"], (1 - step / steps) / (1 - settings["share_seeing"]))
        optimizer.param_groups[0]["lr"] = settings["lr"] * rate
        rows = draw.choices(train, k=settings["batch_size"])
        shares = (1, 0, 0) if step < settings["share_seeing"] * steps else settings["shares"]
        endings = [draw.choices(row["answers"], shares)[0] for row in rows]
        logits, labels = compute_logits(model, rows, endings, words.pad_token_id)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 175 == 0 and step + 1 < steps:
            seen = measure_accuracy(model, test, words.pad_token_id)
            print(f"[model] warm-up step {step + 1}/{steps}: loss {loss.item():.3f}, {seen:.1%} of {len(test)} held-out questions right, "
                  f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
    score = measure_accuracy(model, test, words.pad_token_id)
    print(f"[model] warm-up done in {time.monotonic() - started:.0f} s: {score:.1%} of {len(test)} held-out questions right (greedy)")
    return score


# ---- model -----------------------------------------------------------------------------------------------------------------------


def make_model(data: Path, folder: Path, seed: int, warm_up_steps: int) -> dict[str, Any]:
    """Write the checkpoint into `folder` and return its number of parameters and accuracy."""
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # regardless of OMP_NUM_THREADS: the order of sums, and so the weights, depend on it
    torch.manual_seed(seed)
    model, words = initialize_model(folder, seed=seed)
    model.generation_config = GenerationConfig(eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    model.save_pretrained(folder)
    num_parameters, score = sum(p.numel() for p in model.parameters()), 0.0
    if warm_up_steps:
        from megatron_grpo.core.images import ImageProcessorSpec

        image_spec = ImageProcessorSpec.from_pretrained(folder)
        train, test = (read_rows(data, name, words, image_spec) for name in ("train", "test"))
        print(f"[model] Qwen2.5-VL with {num_parameters:,} parameters; warm-up on {len(train)} pictures, one to two minutes", flush=True)
        score = warm_up(model, words, train, test, seed, {**WARM_UP, "steps": warm_up_steps})
        model.save_pretrained(folder)
    return {"num_parameters": num_parameters, "held_out_accuracy": score}


def compute_fingerprint(data: Path, seed: int, warm_up_steps: int) -> str:
    """Return the hash of everything that determines the weights: this program, the data and the settings."""
    parts = [Path(__file__).read_bytes(), (data / "train.jsonl").read_bytes(), (data / "test.jsonl").read_bytes()]
    parts += [path.read_bytes() for path in sorted(data.rglob("*.png"))]
    return hashlib.sha256(b"\0".join([*parts, f"{seed} {warm_up_steps}".encode()])).hexdigest()


def main() -> None:
    """Make the model that the command line describes."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a second thread brings nothing, and on a busy machine slows both
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("examples/images/data"), help="folder that examples/images/make_data.py made")
    parser.add_argument("--output", type=Path, default=Path("examples/images/model"), help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm_up_steps", type=int, default=WARM_UP["steps"], help="optimizer steps of the warm-up; 0: random weights")
    args = parser.parse_args()
    if not (args.data / "train.jsonl").is_file():
        parser.error(f"{args.data / 'train.jsonl'} is missing: make it with examples/images/make_data.py --output {args.data}")

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path
    from tools.made_once import make_once

    facts = {"fingerprint": compute_fingerprint(args.data, args.seed, args.warm_up_steps), "seed": args.seed}
    make_once(parser, args.output, facts, lambda out: make_model(args.data, out, args.seed, args.warm_up_steps), asked="questions")


if __name__ == "__main__":
    main()
