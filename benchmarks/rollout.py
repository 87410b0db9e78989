"""Compare `ColocatedEngine.generate` with a plain `LLM.generate` of vLLM and with `generate` of transformers, on the same requests.

    python benchmarks/rollout.py --pairs 7
    python benchmarks/rollout.py --pairs 7 --prompts 32 --prompt-tokens 7 --completion 6     # sizes of the quickstart

All run in this process and alternate. "bare vLLM" is an `LLM` with vLLM's defaults, except for what a CPU requires (no compilation, a size
of the KV cache), which returns text and log-probs as TRL requests them. "bare, our options" is the `LLM` inside our engine with our
sampling parameters: the difference to "ours" is the cost of this package. The tokens of these three are compared before times are printed.
"transformers" is `generate` on prompts padded on the left, as TRL calls it without vLLM; it samples other tokens and returns neither
log-probs nor text. Times are CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1]))  # the models of the tests

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from megatron_grpo.core.rollout.colocated import ColocatedEngine
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.core.rollout.vllm_requests import sampling_params
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.core.types import Prompt
from tests.tiny_models import write_tiny

OURS, BARE, INSIDE, GENERATE = "ours", "bare vLLM", "bare, our options", "transformers"


def measure_cpu_seconds(work):
    """Return (CPU seconds, result) of a function."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a round")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of the longest prompt; the shortest has half as many")
    parser.add_argument("--n", type=int, default=8, help="completions per prompt")
    parser.add_argument("--completion", type=int, default=96, help="max_completion_length")
    parser.add_argument("--pairs", type=int, default=7, help="number of rounds")
    parser.add_argument("--profile", action="store_true", help="print a profile of ColocatedEngine.generate")
    return parser.parse_args()


def main() -> None:
    """Measure all ways and print the table."""
    arguments, console = parse_arguments(), Console(width=140)
    torch.set_num_threads(1)
    path = write_tiny(tempfile.mkdtemp(), "qwen3", hidden=128, layers=4, ffn=256, vocab=512, max_positions=1024, std=0.05)
    longest = arguments.prompt_tokens + arguments.completion
    cfg = RolloutConfig(vllm_kv_cache_memory_mb=256, vllm_max_num_seqs=256)
    engine = ColocatedEngine.build(cfg, model_path=path, dtype="float32", max_model_len=longest, seed=0, rank=0, world_size=1)

    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    bare = LLM(str(path), dtype="float32", max_model_len=longest, enforce_eager=True, kv_cache_memory_bytes=256 << 20, max_num_seqs=256,
               seed=0, logprobs_mode="processed_logprobs", enable_chunked_prefill=False, disable_log_stats=True)  # fmt: skip
    tokenizer, rng = bare.get_tokenizer(), np.random.default_rng(0)
    sampling = SamplingSettings(n=arguments.n, max_completion_length=arguments.completion)
    lengths = rng.integers(arguments.prompt_tokens // 2, arguments.prompt_tokens, arguments.prompts, endpoint=True)

    def make_prompts(first: int) -> list[Prompt]:
        texts = [" ".join(map(str, rng.integers(4, 512, length))) for length in lengths]
        return [Prompt(number=first + i, row=first + i, raw=text, token_ids=tuple(tokenizer(text).input_ids), columns={})
                for i, text in enumerate(texts)]  # fmt: skip

    def ask_llm(llm, asked: list[Prompt], params: list[SamplingParams]):
        return llm.generate([{"prompt_token_ids": list(prompt.token_ids)} for prompt in asked], params, use_tqdm=False)

    def make_trl_params(prompt: Prompt) -> SamplingParams:
        return SamplingParams(n=sampling.n, max_tokens=sampling.max_completion_length, logprobs=0, seed=derive_seed(prompt))

    def make_our_params(prompt: Prompt) -> SamplingParams:
        return sampling_params(sampling, derive_seed(prompt), vocab_size=512)

    def derive_seed(prompt: Prompt):
        return engine._request_seed(1, prompt, sampling)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()

    def generate_with_transformers(asked: list[Prompt]):
        texts = [prompt.raw for prompt in asked for _ in range(sampling.n)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():
            return model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=sampling.max_completion_length)

    spent: dict[str, list[float]] = {OURS: [], BARE: [], INSIDE: [], GENERATE: []}
    drawn = []
    for turn in range(arguments.pairs + 1):  # the first round is a warm-up
        asked, found = make_prompts(turn * arguments.prompts), {}
        ways = {
            OURS: lambda: [[one.answer_ids for one in group.completions] for group in engine.generate(asked, sampling, seed=1)],  # noqa: B023 - called in this pass
            BARE: lambda: ask_llm(bare, asked, [make_trl_params(prompt) for prompt in asked]),  # noqa: B023 - called in this pass
            INSIDE: lambda: ask_llm(engine._llm, asked, [make_our_params(prompt) for prompt in asked]),  # noqa: B023 - called in this pass
            GENERATE: lambda: generate_with_transformers(asked),  # noqa: B023 - called in this pass
        }
        for way in ways if turn % 2 else reversed(ways):
            seconds, found[way] = measure_cpu_seconds(ways[way])
            if turn:
                spent[way].append(seconds)
        for way in (BARE, INSIDE):
            answers = [[tuple(one.token_ids) for one in answer.outputs] for answer in found[way]]
            assert answers == found[OURS], f"{way}: sampled other tokens"
        drawn += [sum(len(ids) for group in found[OURS] for ids in group)] if turn else []
    mine, *others, tokens = map(np.array, (*spent.values(), drawn))
    title = f"{arguments.prompts} prompts, {arguments.n} completions each, {len(mine)} rounds"
    table = Table("", "median (from, to)", title=title)
    rows = [(f"{way}, CPU s", np.array(seconds), ".3f") for way, seconds in spent.items()]
    rows += [("tokens of ours per CPU second", tokens / mine, ",.0f")]
    rows += [(f"ours, of the rate of {way}", other / mine, ".3f") for way, other in zip((BARE, INSIDE, GENERATE), others, strict=True)]
    for name, values, form in rows:
        table.add_row(name, f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})")
    console.print(table)
    if arguments.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(engine.generate, asked, sampling, seed=1)
        pstats.Stats(profile).sort_stats("cumtime").print_stats("megatron_grpo", 15)
    sys.stdout.flush()
    os._exit(0)  # a regular exit would take seconds to shut down two engines


if __name__ == "__main__":
    main()
