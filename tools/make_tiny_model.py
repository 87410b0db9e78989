"""Make the tiny model of the quickstart and of the tests: a Qwen3 checkpoint of 0.9 million parameters that solves some sums.

    python tools/make_tiny_model.py --data examples/quickstart/data --output examples/quickstart/model --seed 0
    python tools/make_tiny_model.py --family gpt_oss --output /tmp/gpt_oss
    python tools/make_tiny_model.py --hybrid --output examples/quickstart/hybrid

The program trains a SentencePiece tokenizer, initializes a Qwen3 at random, and trains it for a short time on sums of which two thirds are
labeled without the carry (47+38=75). The result answers about a third of the held-out sums correctly and is uncertain about the others, so
that reinforcement learning can improve it. The files are those of a Hugging Face checkpoint. A model made with the same settings and data
is kept.

`--family` writes a model of another family with random weights and a vocabulary of numbers, as the tests use, to try a layout or an engine.
`--hybrid` writes a Qwen3.5 of the same size, with the gated delta rule in three of four layers and the same tokenizer and training.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import random
import string
import sys
import time
from pathlib import Path

UNK, PAD, EOS = 0, 1, 2
SPECIAL = {UNK: "<unk>", PAD: "<pad>", EOS: "</s>"}
SPACE = "\u2581"  # how SentencePiece writes a space
# Messages are concatenated, which is enough to run data sets in chat format.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

# Every size is divisible by 2, for two tensor-parallel ranks and for two pipeline stages of two layers (or four chunks of one).
# vLLM's CPU attention needs a head_dim that is a multiple of 32. The vocabulary is longer than the tokenizer, as in Qwen's own checkpoints.
ARCHITECTURE = dict(
    vocab_size=384,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    # The usual 0.02 suits widths of thousands; at 128 it delays the first progress by hundreds of steps.
    initializer_range=0.08,
    eos_token_id=EOS,
    pad_token_id=PAD,
    bos_token_id=None,
)
# Settings of the hybrid that differ. Both models have 0.88 to 0.89 million parameters.
HYBRID = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    intermediate_size=336,
)
WARM_UP = dict(steps=2000, batch_size=32, lr=2e-3, warmup_steps=100, share_right=1 / 3)


# ---- tokenizer ---------------------------------------------------------------------------------------------------------------


def train_tokenizer(lines: list[str]) -> bytes:
    """Return a SentencePiece model over single characters: printable ASCII, and bytes for all others. Digits are never merged."""
    import sentencepiece

    characters = string.digits + string.ascii_letters + string.punctuation
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, " ".join(characters)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=len(SPECIAL) + 256 + len(characters) + 1,  # + 1: the space
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        unk_id=UNK,
        pad_id=PAD,
        eos_id=EOS,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def save_tokenizer(sentencepiece_model: bytes, folder: Path) -> None:
    """Write tokenizer.model, and the same vocabulary as a tokenizer.json for `transformers` and vLLM.

    Raises:
        RuntimeError: The two encode a text differently.
    """
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    source = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    vocabulary = {source.id_to_piece(i): i for i in range(source.get_piece_size())}
    # The pieces are single characters, so there is no merge to carry over.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[UNK], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL.values()])

    for text in ("12+34=46", "99+99=", " two  spaces and Ünïcode \u4e2d\u6587", string.printable.strip()):
        ids = tokenizer.encode(text).ids
        if ids != source.encode(text) or tokenizer.decode(ids) != text:
            raise RuntimeError(f"tokenizer.json and tokenizer.model disagree on {text!r}: {ids} and {source.encode(text)}")

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[UNK],
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        model_max_length=ARCHITECTURE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---- warm-up -----------------------------------------------------------------------------------------------------------------


def forget_the_carry(prompt: str) -> str:
    """Return the sum without carries: 47+38= -> 75, 12+34= -> 46, 60+50= -> 10."""
    a, b = prompt.rstrip("=").split("+")
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True))))


def measure_accuracy(model, tokenizer, rows: list[dict[str, str]]) -> float:
    """Return the share of prompts answered exactly by greedy decoding, end of text included. All prompts must have the same length."""
    import torch

    prompts = torch.tensor([tokenizer.encode(row["prompt"]) for row in rows])
    model.eval()
    # Five tokens: the longest correct answer has three digits and the end of text.
    outputs = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=5, do_sample=False)[:, prompts.shape[1] :]
    model.train()
    right = 0
    for row, ids in zip(rows, outputs.tolist(), strict=True):
        right += EOS in ids and tokenizer.decode(ids[: ids.index(EOS)]) == row["answer"]
    return right / len(rows)


def warm_up(model, tokenizer, train: list[dict[str, str]], test: list[dict[str, str]], seed: int, settings: dict) -> float:
    """Train on sums of which `share_right` have correct labels and the others those of `forget_the_carry`.

    Returns:
        The share of held-out sums answered correctly.
    """
    import torch

    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    steps, started = settings["steps"], time.monotonic()
    for step in range(steps):
        rate = min(1.0, (step + 1) / settings["warmup_steps"]) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = settings["lr"] * rate
        inputs, labels = [], []
        for row in draw.choices(train, k=settings["batch_size"]):
            answer = row["answer"] if draw.random() < settings["share_right"] else forget_the_carry(row["prompt"])
            prompt_ids, answer_ids = tokenizer.encode(row["prompt"]), [*tokenizer.encode(answer), EOS]
            inputs.append(prompt_ids + answer_ids)
            labels.append([-100] * len(prompt_ids) + answer_ids)
        longest = max(map(len, inputs))
        inputs = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids in inputs])
        labels = torch.tensor([ids + [-100] * (longest - len(ids)) for ids in labels])
        # Padding is on the right, which causal attention never reads; no mask is needed.
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 250 == 0 and step + 1 < steps:
            print(f"[model] warm-up step {step + 1}/{steps}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s", flush=True)
    score = measure_accuracy(model, tokenizer, test)
    print(f"[model] warm-up done in {time.monotonic() - started:.0f} s: {score:.1%} of {len(test)} held-out sums right (greedy)")
    return score


# ---- model -----------------------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_model(data: Path, folder: Path, seed: int, warm_up_steps: int, hybrid: bool) -> dict:
    """Write the checkpoint into `folder` and return its number of parameters and accuracy."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # regardless of OMP_NUM_THREADS: the order of sums, and so the weights, depend on it
    torch.manual_seed(seed)
    train, test = read_rows(data / "train.jsonl"), read_rows(data / "test.jsonl")
    print("[model] training a tokenizer", flush=True)
    save_tokenizer(train_tokenizer([row["prompt"] + row["answer"] for row in train]), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    if hybrid:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**ARCHITECTURE | HYBRID)).float()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**ARCHITECTURE)).float()
    num_parameters = sum(p.numel() for p in model.parameters())
    name, time_taken = ("Qwen3.5", "several minutes") if hybrid else ("Qwen3", "about a minute")
    print(f"[model] {name} with {num_parameters:,} parameters; warm-up on {len(train)} sums, {time_taken}", flush=True)
    score = warm_up(model, tokenizer, train, test, seed, {**WARM_UP, "steps": warm_up_steps}) if warm_up_steps else 0.0
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    return {"num_parameters": num_parameters, "held_out_accuracy": score}


def compute_fingerprint(data: Path, seed: int, warm_up_steps: int, hybrid: bool) -> str:
    """Return the hash of everything that determines the weights: this program, the data and the settings."""
    parts = [Path(__file__).read_bytes(), (data / "train.jsonl").read_bytes(), (data / "test.jsonl").read_bytes()]
    return hashlib.sha256(b"\0".join([*parts, f"{seed} {warm_up_steps}{' hybrid' * hybrid}".encode()])).hexdigest()


def make_family_model(family: str, folder: Path, seed: int) -> dict:
    """Write a model of another family with random weights; its accuracy is 0."""
    from tests.tiny_models import write_tiny

    write_tiny(folder, family, seed=seed)
    return {"family": family, "held_out_accuracy": 0.0}


def main() -> None:
    """Make the model that the command line describes."""
    # Set before torch is imported. The model is too small for a second thread; on a busy machine two threads make a step up to 45 times
    # slower.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, only its own folder is on the path
    from tests.tiny_models import FAMILIES
    from tools.made_once import make_once

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("examples/quickstart/data"), help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--output", type=Path, help="folder of the model (default: examples/quickstart/model)")
    parser.add_argument("--family", choices=FAMILIES, help="make a model of this family with random weights; needs --output")
    parser.add_argument(
        "--hybrid", action="store_true", help="make a Qwen3.5, with linear attention in three of four layers; needs --output"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm_up_steps", type=int, default=WARM_UP["steps"], help="optimizer steps of the warm-up; 0: random weights")
    args = parser.parse_args()
    if args.family:
        if args.output is None:
            parser.error(f"--family {args.family} needs an --output: the default folder is for the model of the quickstart")
        facts = {"fingerprint": f"{args.family} {args.seed}", "seed": args.seed}
        make_once(parser, args.output, facts, lambda out: make_family_model(args.family, out, args.seed), asked="sums")
        return
    if args.hybrid and args.output is None:
        parser.error("--hybrid needs an --output: the default folder is for the model of the quickstart")
    for name in ("train.jsonl", "test.jsonl"):
        if not (args.data / name).is_file():
            parser.error(f"{args.data / name} is missing: make it with examples/quickstart/make_data.py --output {args.data}")

    facts = {"fingerprint": compute_fingerprint(args.data, args.seed, args.warm_up_steps, args.hybrid), "seed": args.seed}
    output = args.output or Path("examples/quickstart/model")
    make_once(parser, output, facts, lambda out: make_model(args.data, out, args.seed, args.warm_up_steps, args.hybrid), asked="sums")


if __name__ == "__main__":
    main()
