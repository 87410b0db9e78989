"""Make the tiny chat model of an example with turns: a Qwen3 of 0.9 million parameters that solves its task sometimes.

    python tools/make_tiny_chat_model.py examples/calculator

Like make_tiny_model.py, the program trains a tokenizer (BPE, with ChatML's tokens), initializes a Qwen3 at random, and trains it for a
short time on episodes of the example's episodes.py, most of which contain mistakes. It writes data and model into the example's folder. A
model made from the same sources is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# ChatML with the tool format of Hermes and Qwen: calls are JSON between <tool_call> tags, results are in a user message.
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
ARCHITECTURE = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.08, bos_token_id=None,
)  # fmt: skip
MAX_PIECES, NUM_TEXTS = 480, 600
BATCH_SIZE, LR, STEPS_TO_FULL_LR = 32, 2e-3, 100


def load_example(folder: Path) -> Any:
    """Return the module episodes.py of an example."""
    spec = importlib.util.spec_from_file_location("episodes", folder / "episodes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_schemas(flags: tuple[str, ...]) -> list[dict] | None:
    """Return the tool schemas that a run with these flags shows to the template; the model must be trained on the same ones."""
    from megatron_grpo.plugins.environments.loading import load_environment
    from megatron_grpo.run.config.parse import resolve

    environment = load_environment(resolve([*flags]))
    return [dict(tool) for tool in environment.tools] or None if environment else None


def build_tokenizer(texts: list[str], folder: Path) -> Any:
    """Train and save a BPE tokenizer whose tokens never cross a line, a digit or a special token, so that turns are encoded separately."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", behavior="merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (PAD, START, END)]
    stretches = [part for text in texts for piece in text.split(START) for part in piece.split(END) if part]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=MAX_PIECES, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(stretches, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, model_max_length=ARCHITECTURE["max_position_embeddings"],
        clean_up_tokenization_spaces=False, chat_template=TEMPLATE,
    )  # fmt: skip
    wrapped.save_pretrained(folder)
    return wrapped


def encode(tokenizer: Any, messages: list[dict], tools: list[dict] | None) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of an episode. Only assistant messages have labels; each is encoded separately, as in sampling."""
    ids: list[int] = []
    labels: list[int] = []
    shown = ""
    for end, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:end], tools=tools, tokenize=False, add_generation_prompt=True)
        heard, said = tokenizer(before[len(shown) :])["input_ids"], tokenizer(message["content"] + END)["input_ids"]
        ids += heard + said
        labels += [-100] * len(heard) + said
        shown = before + message["content"] + END
    return ids, labels


def warm_up(model: Any, tokenizer: Any, example: Any, train: list[dict], tools: list[dict] | None, steps: int, draw: random.Random) -> None:
    """Train the model on random episodes.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        example: Module of the example.
        train: Tasks to draw from.
        tools: Tool schemas.
        steps: Optimizer steps.
        draw: Random generator.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / STEPS_TO_FULL_LR) * 0.5 * (1 + math.cos(math.pi * step / steps))
        batch = [encode(tokenizer, example.make_episode(draw, draw.choice(train)), tools) for _ in range(BATCH_SIZE)]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch])[:, 1:]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[labels != -100]), labels[labels != -100])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            print(f"[model] warm-up step {step + 1}/{steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


def make_model(folder: Path, out: Path, seed: int, steps: int | None) -> None:
    """Make the model and its tokenizer, and write them into `out`.

    Args:
        folder: Folder of the example.
        out: Folder of the model.
        seed: Seed.
        steps: Optimizer steps; None: WARM_UP_STEPS of the example.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # regardless of OMP_NUM_THREADS: the order of sums, and so the weights, depend on it
    torch.manual_seed(seed)
    example, draw = load_example(folder), random.Random(seed)
    tools, train = load_schemas(example.FLAGS), example.make_rows()["train"]
    shown = [(example.make_episode(draw, draw.choice(train)), tools) for _ in range(NUM_TEXTS)]
    tokenizer = build_tokenizer([render(messages, tools) for messages, tools in shown], out)
    vocab_size = -(-len(tokenizer) // 128) * 128
    config = Qwen3Config(**ARCHITECTURE, vocab_size=vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = Qwen3ForCausalLM(config).float()
    steps = example.WARM_UP_STEPS if steps is None else steps
    print(f"[model] Qwen3 with {sum(p.numel() for p in model.parameters()):,} parameters; {steps} steps of warm-up", flush=True)
    warm_up(model, tokenizer, example, train, tools, steps, draw)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)


def render(messages: list[dict], tools: list[dict] | None) -> str:
    """Return the text of messages by the chat template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=TEMPLATE, add_generation_prompt=False)
    return text


def main() -> None:
    """Write the data and the model of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="folder of the example, with episodes.py")
    parser.add_argument("--output", type=Path, help="folder of data and model (default: that of the example)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps of the warm-up (default: WARM_UP_STEPS of episodes.py)")
    args = parser.parse_args()
    out = args.output or args.example
    (out / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in load_example(args.example).make_rows().items():
        (out / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sources = [Path(__file__), *sorted(args.example.glob("*.py"))]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + f"{args.seed} {args.steps}".encode()).hexdigest()
    made_by = out / "model" / "made_by.json"
    if made_by.is_file() and json.loads(made_by.read_text())["key"] == key:
        print(f"[model] {out / 'model'} exists; kept")
        return
    shutil.rmtree(out / "model", ignore_errors=True)
    (out / "model").mkdir()
    make_model(args.example, out / "model", args.seed, args.steps)
    made_by.write_text(json.dumps({"key": key, "seed": args.seed}) + "\n")


if __name__ == "__main__":
    main()
