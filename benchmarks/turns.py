"""Compare multi-turn episodes with sampling the same contexts in one batch: the cost of requests that join and leave a running engine.

    python benchmarks/turns.py --episodes 256 --turns 4 --tokens 24 --rounds 3

CPU seconds of this process, with a tiny model. Both ways sample the same number of tokens in the same contexts, because every turn has
exactly `--tokens` tokens: a truncated turn counts as complete. The prefix cache is enabled in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Write a tiny model and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("episodes", 256), ("turns", 4), ("tokens", 24), ("rounds", 3), ("hidden", 128), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from tests.chat_models import write_chat

    with tempfile.TemporaryDirectory() as folder:
        path = write_chat(Path(folder) / "model", ends=0.0, hidden=args.hidden, layers=args.layers, ffn=3 * args.hidden)
        measure(path, args)


def measure(path: Path, args: argparse.Namespace) -> None:
    """Print tokens, CPU seconds and wall-clock seconds of both ways, and the ratio of their CPU seconds.

    Args:
        path: Path of the model.
        args: Arguments of the command line.
    """
    from megatron_grpo.core.rollout.colocated import ColocatedEngine
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.rollout.turns import EngineTurnSampler, request_seed
    from megatron_grpo.core.settings import RolloutConfig
    from megatron_grpo.core.types import Prompt
    from megatron_grpo.plugins.environments.episode_runner import EpisodeRunner, EpisodeRunnerFactory
    from megatron_grpo.plugins.environments.protocol import Environment
    from megatron_grpo.plugins.environments.trajectory import ChatTemplate
    from tests.chat_models import chat_tokenizer

    class RepeatingEnvironment(Environment):
        def reply(self, turn):
            return [{"role": "user", "content": "again"}], 0.0, False

    class FixedLengthSampler(EngineTurnSampler):
        """Sampler whose turns all have `--tokens` tokens."""

        def submit(self, key, token_ids, *, seed, max_tokens):
            asked.append((tuple(token_ids), seed))
            super().submit(key, token_ids, seed=seed, max_tokens=args.tokens)

        def poll(self):
            return [(key, dataclasses.replace(drawn, is_cut=False)) for key, drawn in super().poll()]

    cfg = RolloutConfig(vllm_kv_cache_memory_mb=512, vllm_max_num_seqs=256)
    engine = ColocatedEngine.build(cfg, model_path=path, dtype="float32", max_model_len=1000, seed=0, rank=0, world_size=1)
    tokenizer = chat_tokenizer()
    question = [{"role": "user", "content": "What is it?"}]
    ids = tuple(tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"])
    prompts = [Prompt(number=i, row=i, raw=question, token_ids=ids, columns={}) for i in range(args.episodes // 8)]
    limits = dict(max_turns=args.turns, max_completion_length=800, max_model_len=1000, timeout=60.0, concurrency=64)
    stage = EpisodeRunnerFactory(environment=RepeatingEnvironment, template=ChatTemplate(tokenizer, end_ids=[2]), system=None, **limits)
    sampling = SamplingSettings(n=8, max_completion_length=args.tokens)

    def run_episodes() -> int:
        asked.clear()
        play = EpisodeRunner(stage, prompts, n=8, derive_seed=lambda number, index, turn: request_seed(number, number, index, turn, n=8))
        turns = FixedLengthSampler(engine._llm.llm_engine, sampling, version=0)
        while not play.advance(turns, 10.0, version=0):
            pass
        return sum(one.num_sampled for group in play.groups() for one in group.completions)

    def run_batch() -> int:
        turns = EngineTurnSampler(engine._llm.llm_engine, sampling, version=0)
        for index, (token_ids, seed) in enumerate(asked):
            turns.submit((index, 0), token_ids, seed=seed, max_tokens=args.tokens)
        count = 0
        while turns.num_running:
            count += sum(len(drawn.token_ids) for _, drawn in turns.poll())
        return count

    asked: list[tuple[tuple[int, ...], int]] = []
    run_episodes(), run_batch()  # warm-up
    for round_ in range(args.rounds):
        found = {}
        for name, work in (("episodes", run_episodes), ("batch", run_batch)):
            engine._forget_prefixes()
            began, wall = time.process_time(), time.monotonic()
            tokens = work()
            found[name] = time.process_time() - began
            print(f"round {round_ + 1}, {name}: {tokens:,} tokens, {found[name]:.2f} CPU s, {time.monotonic() - wall:.2f} s")
        print(f"round {round_ + 1}: episodes have {found['batch'] / found['episodes']:.2f} of the speed of one batch (CPU seconds)")


if __name__ == "__main__":
    main()
