"""Compare one optimizer step with TRL's GRPOTrainer on the same tokens, and profile ours.

    python benchmarks/training_step.py --batch D --pairs 5
    python benchmarks/training_step.py --batch W --profile

Both trainers run in this process and alternate on each batch. TRL samples nothing: its `rollout_func` returns random tokens, and our
trainer uses the advantages that TRL computes. All gradients of the first step are compared before times are printed. Times are CPU seconds
of this process on one thread. Quote the ratios: both steps of a pair have the same conditions, while machines differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the models and the ranks of the tests

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from megatron_grpo.core.types import Sample
from tests import parity_cases as cases
from tests.tiny_models import EOS, write_tiny

# prompt: tokens of a prompt. completion: tokens of a completion, or their mean. prompts: number of prompts. vocab: size of the vocabulary.
BATCHES = {
    "A": SimpleNamespace(prompt=7, completion=64, varies=False, prompts=8, vocab=64),  # short prompts, equal lengths
    "D": SimpleNamespace(prompt=64, completion=96, varies=True, prompts=8, vocab=64),  # varying lengths
    "E": SimpleNamespace(prompt=256, completion=64, varies=False, prompts=8, vocab=64),  # long prompts
    "W": SimpleNamespace(prompt=128, completion=256, varies=False, prompts=4, vocab=32768),  # large vocabulary
}
for kind in BATCHES.values():
    kind.group, kind.longest = 8, 512  # completions of a prompt; tokens of the longest
# Names of operations in a profile by kind; others count as elementwise.
KINDS = {
    "GEMM": ("aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_"),
    "attention": ("aten::_scaled_dot_product_flash_attention",),
    "optimizer": ("Optimizer.step", "aten::_foreach", "aten::_fused_adam"),
    "copies": ("aten::copy_", "aten::cat", "aten::index", "aten::_index_put", "aten::fill_", "aten::gather"),
}


def measure_cpu_seconds(work):
    """Return (CPU seconds, result) of a function."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


class OurTrainer:
    """Policy of this package that trains on the batches of TRL.

    Args:
        path: Path of the model.
        arguments: Arguments of the command line.
    """

    def __init__(self, path: Path, arguments: argparse.Namespace):
        cfg = cases.settings(
            loss_type="dapo", clip_grad=1.0, lr=1e-6, weight_decay=0.0, adam_eps=1e-8, temperature=1.0,
            max_completion_length=BATCHES[arguments.batch].longest, max_tokens_per_micro_batch=arguments.budget,
            share_prefix=arguments.share_prefix, torch_dtype=arguments.dtype, padded_vocab_multiple=128,
        )  # fmt: skip
        self.group = BATCHES[arguments.batch].group
        self.policy, self.steps = cases.build(path, cfg, 1), 0
        self.gradients: dict[str, np.ndarray] = {}
        act = self.policy.optimizer.step

        def step():
            if not self.gradients:
                self.gradients = cases.full_gradients(self.policy)
            return act()

        self.policy.optimizer.step = step

    def make_batch(self, tokens):
        """Return the batch of a step.

        Args:
            tokens: (prompt, completion, advantage) of each row; the rows of a group are consecutive.
        """
        samples = []
        for row, (prompt, completion, advantage) in enumerate(tokens):
            mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
            samples.append(Sample(
                row=row, rollout=self.steps, prompt_number=row // self.group, version=self.steps, on_policy_version=self.steps,
                token_ids=np.array(prompt + completion), mask=mask, sampler_logprobs=np.full(len(mask), np.nan, dtype=np.float32),
                advantage=advantage, is_zero_std=False, is_truncated=False,
            ))  # fmt: skip
        starts = range(0, len(samples), self.group)
        grouped = [one for first in starts for one in cases.with_prefix(samples[first : first + self.group])]
        batch = cases.make_batch(self.policy, grouped, self.steps)
        self.steps += 1
        return batch


def make_trl_trainer(path: Path, arguments: argparse.Namespace, on_step, *, seconds=time.process_time, **config):
    """Return a GRPOTrainer that trains on random tokens.

    Args:
        path: Path of the model.
        arguments: Arguments of the command line.
        on_step: Function called after each optimizer step with the tokens of the step and its seconds.
        seconds: Clock.
        config: Further arguments of GRPOConfig.
    """
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    kind, rng, now = BATCHES[arguments.batch], np.random.default_rng(arguments.seed), SimpleNamespace(apart=0.0, begun=0.0)
    rows = kind.prompts * kind.group
    micro = min(arguments.trl_micro_batch, rows)

    def make_rollout(prompts, trainer):
        lengths = np.full(len(prompts), kind.completion)
        if kind.varies:  # lognormal, sigma 0.9, of this mean
            lengths = np.clip(rng.lognormal(np.log(kind.completion) - 0.405, 0.9, len(prompts)).round(), 1, kind.longest).astype(int)
        own = [rng.integers(4, 64, kind.prompt).tolist() for _ in range(len(prompts) // kind.group)]
        now.prompts = [own[row // kind.group] for row in range(len(prompts))]
        now.completions = [[*rng.integers(4, 64, length - 1).tolist(), EOS] for length in lengths]
        return {"prompt_ids": now.prompts, "completion_ids": now.completions, "logprobs": None}

    def draw_rewards(completions, **unused):
        return rng.normal(size=len(completions)).tolist()

    class StepTimer(TrainerCallback):
        def on_step_begin(self, *unused, **others):
            now.apart, now.begun = 0.0, seconds()

        def on_step_end(self, *unused, **others):
            spent = seconds() - now.begun - now.apart
            on_step(list(zip(now.prompts, now.completions, now.advantages, strict=True)), spent)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"),
        reward_funcs=draw_rewards,
        args=GRPOConfig(**dict(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
            num_generations=kind.group, max_completion_length=kind.longest, max_steps=arguments.pairs + 1, learning_rate=1e-6,
            lr_scheduler_type="constant", beta=0.0, temperature=1.0, loss_type="dapo", use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", seed=arguments.seed,
        ) | config),
        train_dataset=Dataset.from_list([{"prompt": str(4 + number)} for number in range(60)]),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[StepTimer()],
        rollout_func=make_rollout,
    )  # fmt: skip
    generate, clip, trainer.first_gradients = trainer._generate_and_score_completions, trainer.accelerator.clip_grad_norm_, {}

    def time_generation(inputs):
        begun = seconds()
        found = generate(inputs)
        now.apart += seconds() - begun
        now.advantages = found["advantages"].tolist()
        return found

    def record_gradients(parameters, *others, **more):
        if not trainer.first_gradients:
            trainer.first_gradients = {name: cases._numpy(p.grad) for name, p in trainer.model.named_parameters()}
        return clip(parameters, *others, **more)

    trainer._generate_and_score_completions, trainer.accelerator.clip_grad_norm_ = time_generation, record_gradients
    return trainer


def measure_gemm_rate(tokens: int = 2048, hidden: int = 128, out: int = 256) -> float:
    """Return the GFLOP/s of a matrix product of the model's size at this moment."""
    x, w, y = torch.randn(tokens, hidden), torch.randn(hidden, out), torch.empty(tokens, out)
    spent = [measure_cpu_seconds(lambda: [torch.mm(x, w, out=y) for _ in range(20)])[0] / 20 for _ in range(5)]
    return 2e-9 * tokens * hidden * out / min(spent)


def count_least_products(policy, batch) -> float:
    """Return the GFLOP of the necessary matrix products of a step: three per token and matrix, and three per trained token and head."""
    sizes = {name: tensor.numel() for name, tensor in policy.named_weights() if tensor.dim() == 2}
    head = sizes.pop("lm_head.weight", 0) or sizes["model.embed_tokens.weight"]
    sizes.pop("model.embed_tokens.weight")
    computed = sum(int((micro.num_references > 0).sum()) for micro in batch.micro_batches)
    trained = sum(len(micro.targets) for micro in batch.micro_batches)
    return 6e-9 * (sum(sizes.values()) * computed + head * trained)


def profile_step(policy, batch) -> Table:
    """Return a table with the seconds of one step by kind of work, and those of the head."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        begun = time.perf_counter()  # the wall clock, as in the profile: on a busy machine only the shares are meaningful
        policy.train_step(batch)
        spent = time.perf_counter() - begun
    totals = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    for event in found.key_averages():
        if event.key.startswith(("aten::", "Optimizer")):
            kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "elementwise")
            totals[kind] += event.self_cpu_time_total / 1e6
    head = sum(event.cpu_time_total for event in found.key_averages() if event.key.startswith(("_LinearLogprobs", "_OnePass"))) / 1e6
    table = Table("work", "seconds", "share", title=f"one step: {spent:.2f} s under the profiler")
    for kind, seconds in (totals | {"Python, and the rest": spent - sum(totals.values())}).items():
        table.add_row(kind, f"{seconds:.3f}", f"{seconds / spent:.0%}")
    table.add_row("of all this, the head", f"{head:.3f}", f"{head / spent:.0%}")
    return table


def measure_head_peak(words: int, tokens: int = 4096, hidden: int = 128) -> float:
    """Return the peak memory of forward and backward of the head in MiB, relative to the memory before.

    Args:
        words: Size of the vocabulary.
        tokens: Number of tokens.
        hidden: Hidden size.
    """
    from megatron_grpo.core.parallel.vocab import linear_logprobs

    states, weight = torch.randn(tokens, hidden, requires_grad=True), torch.randn(words, hidden, requires_grad=True)
    targets, process, done = torch.randint(words, (tokens,)), psutil.Process(), threading.Event()

    def slope(chunk: slice, logprobs: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(logprobs)

    before = highest = process.memory_info().rss

    def watch():
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    linear_logprobs(states, weight, targets, temperature=1.0, slope=slope).logprobs.sum().backward()
    done.set()
    watcher.join()
    return (highest - before) / 2**20


def compare_gradients(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], bar: float = 1e-4) -> float:
    """Return the worst relative error of a gradient tensor; exit if it exceeds `bar`, because times would be meaningless.

    Args:
        mine: Gradients of our trainer.
        theirs: Gradients of TRL.
        bar: Limit.
    """
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    worst, name = max((float(np.linalg.norm(mine[n] - g) / np.linalg.norm(g)), n) for n, g in theirs.items())
    if worst > bar:
        raise SystemExit(f"the gradient of {name} differs by {worst:.1e} from TRL's: the two did not compute the same step")
    return worst


def format_spread(values) -> str:
    """Return "median (minimum to maximum)"."""
    return f"{np.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", choices=BATCHES, default="D", help="sizes of the batch")
    parser.add_argument("--pairs", type=int, default=5, help="steps of each trainer")
    parser.add_argument("--budget", type=int, default=4096, help="max_tokens_per_micro_batch of our trainer")
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="per_device_train_batch_size of TRL")
    parser.add_argument("--share_prefix", default="auto", help="share_prefix of our trainer")
    parser.add_argument("--dtype", choices=("float32",), default="float32")
    parser.add_argument("--profile", action="store_true", help="print a profile of another step of our trainer")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train all pairs and print the tables."""
    arguments, console = parse_arguments(), Console()
    torch.set_num_threads(1)
    kind = BATCHES[arguments.batch]
    path = write_tiny(tempfile.mkdtemp(), "qwen3", vocab=kind.vocab, hidden=128, layers=4, ffn=256, max_positions=1024, std=0.05)
    peak = measure_head_peak(kind.vocab) if arguments.profile else 0.0
    ours, pairs, reached, last = OurTrainer(path, arguments), [], [], []

    def train_pair(tokens, trl_seconds):
        batch = ours.make_batch(tokens)
        pairs.append((trl_seconds, measure_cpu_seconds(lambda: ours.policy.train_step(batch))[0]))
        reached.append(count_least_products(ours.policy, batch) / measure_gemm_rate() / pairs[-1][1])
        last[:] = [batch]

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # set by our trainer; with them, TRL would use DDP and be slower
        os.environ.pop(name, None)
    trainer = make_trl_trainer(path, arguments, train_pair)
    trainer.train()
    assert trainer.model_wrapped is trainer.model
    console.print(f"worst gradient tensor against TRL's: {compare_gradients(ours.gradients, trainer.first_gradients):.1e} of its norm")
    theirs, mine = zip(*pairs[1:])  # the first step allocates
    table = Table("", "median (from, to)", title=f"batch {arguments.batch}, {len(mine)} pairs")
    table.add_row("TRL, CPU s", format_spread(theirs))
    table.add_row("ours, CPU s", format_spread(mine))
    table.add_row("TRL / ours, of pairs", format_spread([a / b for a, b in zip(theirs, mine)]))
    table.add_row("ours, of the GEMM limit", format_spread(reached[1:]))
    console.print(table)
    if arguments.profile:
        console.print(profile_step(ours.policy, last[0]))
        console.print(f"the head on 4,096 tokens and {kind.vocab:,} words: at most {peak:.0f} MiB above the model")


if __name__ == "__main__":
    main()
