"""Makes the tiny model of the quickstart and of the tests: a Qwen3 checkpoint of 0.9 million parameters that half knows how to add.

Three parts: a tokenizer trained by SentencePiece, a randomly initialised Qwen3, and a short supervised warm-up on sums in which two
labels out of three forget the carry (47+38=75). What comes out is right on about a third of the held-out sums, and unsure in the rest:
something that reinforcement learning can mend. The files are those of any Hugging Face checkpoint.

    python tools/make_tiny_model.py --data examples/quickstart/data --output examples/quickstart/model --seed 0

A second call with the same settings and data keeps what is there.

    python tools/make_tiny_model.py --family gpt_oss --output /tmp/gpt_oss

writes a model of another family instead, to try a layout or an engine with: as small, with random weights and a vocabulary of numbers, as
the tests make theirs.

    python tools/make_tiny_model.py --hybrid --output examples/quickstart/hybrid

writes a Qwen3.5 of as many parameters, with the gated delta rule in three of four layers, with the same tokenizer and warm-up.
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
# Messages are simply joined: enough for data sets in chat form to run.
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
# What differs in a hybrid. Both models have 0.88 to 0.89 million parameters.
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
    """A SentencePiece model over single characters: the printable ASCII ones, and bytes for all else. Digits are never merged."""
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
    """Writes tokenizer.model, and the same vocabulary as the tokenizer.json that `transformers` and vLLM read.

    Raises RuntimeError where the two would not give the same ids.
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
    """What someone answers who adds column by column and drops every carry: 47+38= -> 75, 12+34= -> 46, 60+50= -> 10."""
    a, b = prompt.rstrip("=").split("+")
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True))))


def measure_accuracy(model, tokenizer, rows: list[dict[str, str]]) -> float:
    """Share of rows answered exactly, greedily, end of text included. The prompts are equally long, so they make one batch."""
    import torch

    prompts = torch.tensor([tokenizer.encode(row["prompt"]) for row in rows])
    model.eval()
    # Five tokens: three digits and the end are the longest right answer.
    outputs = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=5, do_sample=False)[:, prompts.shape[1] :]
    model.train()
    right = 0
    for row, ids in zip(rows, outputs.tolist(), strict=True):
        right += EOS in ids and tokenizer.decode(ids[: ids.index(EOS)]) == row["answer"]
    return right / len(rows)


def warm_up(model, tokenizer, train: list[dict[str, str]], test: list[dict[str, str]], seed: int, settings: dict) -> float:
    """Trains on sums of which `share_right` are labelled rightly and the others by `forget_the_carry`. Returns the held-out share right."""
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
        # Padding stands on the right, where causal attention never looks; no mask is needed.
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


# ---- the whole -----------------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_model(data: Path, folder: Path, seed: int, warm_up_steps: int, hybrid: bool) -> dict:
    """Writes the checkpoint into `folder` and returns what it was made of and how it scores."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # whatever the shell says: the order of sums, and so the weights, depend on it
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
    """Of everything that decides the weights: this program, the data, the settings."""
    parts = [Path(__file__).read_bytes(), (data / "train.jsonl").read_bytes(), (data / "test.jsonl").read_bytes()]
    return hashlib.sha256(b"\0".join([*parts, f"{seed} {warm_up_steps}{' hybrid' * hybrid}".encode()])).hexdigest()


def make_family_model(family: str, folder: Path, seed: int) -> dict:
    """A checkpoint with random weights: nothing was learnt that could be scored."""
    from tests.tiny_models import write_tiny

    write_tiny(folder, family, seed=seed)
    return {"family": family, "held_out_accuracy": 0.0}


def main() -> None:
    # Before torch is imported. The work is so small that a second thread gains nothing; on a busy machine the two wait for each other,
    # and a step takes up to 45 times as long.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone
    from tests.tiny_models import FAMILIES
    from tools.made_once import make_once

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("examples/quickstart/data"), help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--output", type=Path, help="folder of the model (default: examples/quickstart/model)")
    parser.add_argument("--family", choices=FAMILIES, help="another one, with random weights; it needs an --output")
    parser.add_argument("--hybrid", action="store_true", help="Qwen3.5, with states in three of four layers; it needs an --output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm_up_steps", type=int, default=WARM_UP["steps"], help="0: random weights")
    args = parser.parse_args()
    if args.family:
        if args.output is None:
            parser.error(f"--family {args.family} needs an --output, for the model of the quickstart is another one")
        facts = {"fingerprint": f"{args.family} {args.seed}", "seed": args.seed}
        make_once(parser, args.output, facts, lambda out: make_family_model(args.family, out, args.seed), asked="sums")
        return
    if args.hybrid and args.output is None:
        parser.error("--hybrid needs an --output, for the model of the quickstart is another one")
    for name in ("train.jsonl", "test.jsonl"):
        if not (args.data / name).is_file():
            parser.error(f"{args.data / name} is missing: make it with examples/quickstart/make_data.py --output {args.data}")

    facts = {"fingerprint": compute_fingerprint(args.data, args.seed, args.warm_up_steps, args.hybrid), "seed": args.seed}
    output = args.output or Path("examples/quickstart/model")
    make_once(parser, output, facts, lambda out: make_model(args.data, out, args.seed, args.warm_up_steps, args.hybrid), asked="sums")


if __name__ == "__main__":
    main()
