"""Measure the cost of HTTP in sampling from a rollout server: CPU seconds of client, HTTP process and engine.

    python benchmarks/server_http.py --rounds 5

The benchmark runs one real server with a model of 50 million parameters and one client, which sends requests as a trainer's rank 0 does:
two calls at a time, one request per group. "client" is this process, which encodes, waits, decodes and checks. "HTTP process" is the
server's front end: routes, detokenization, and vLLM's own front end, which would cost the same without HTTP. "engine" samples. If the
engine is never idle, HTTP does not slow down sampling.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the models and the servers of the tests

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.plugins.servers import http, wire
from megatron_grpo.plugins.servers.addresses import Address
from megatron_grpo.plugins.servers.requests import GenerationRequest
from megatron_grpo.plugins.servers.server_group import ServerRequirements, TrainingServerGroup
from tests.servers import TOKEN, Server, Trainer, push
from tests.tiny_models import write_tiny

MODEL = dict(family="qwen3", vocab=32000, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, ffn=1536, max_positions=1024, std=0.02)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a round")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--n", type=int, default=8, help="completions per prompt")
    parser.add_argument("--completion", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    return parser.parse_args()


def sum_cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of some processes so far, without their children."""
    return sum(times.user + times.system for times in (psutil.Process(pid).cpu_times() for pid in pids))


def main() -> None:
    """Start the server, measure all rounds and print the table."""
    arguments, console, rng = parse_arguments(), Console(width=140), np.random.default_rng(0)
    folder = Path(tempfile.mkdtemp())
    model = write_tiny(folder / "model", **MODEL)
    read = HfReader(model)
    longest = arguments.prompt_tokens + arguments.completion
    sequences = str(arguments.prompts * arguments.n)
    server = Server(folder / "server", model, "--vllm_max_num_seqs", sequences, "--vllm_kv_cache_memory_mb", "512", "--vllm_max_model_len",
                    str(longest))  # fmt: skip
    try:
        server.wait()
        client = partial(http.Server, token=TOKEN, incarnation="1")
        server_group = TrainingServerGroup(lambda: [Address(server.host, server.port, False)], client, run="a run",
                      incarnation="1", requirements=ServerRequirements(max_model_len=longest), timeout=240.0, say=print)  # fmt: skip
        server_group.gather()
        push(Trainer().link(server), [(name, read(name)) for name in read.names], server, bucket_bytes=16 << 20, version=1)
        server_group.gather()
        tree = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(recursive=True))]
        engines = [pid for pid in tree if "EngineCore" in " ".join(psutil.Process(pid).cmdline()) + psutil.Process(pid).name()]
        speakers = [pid for pid in tree if pid not in engines]
        assert engines and speakers
        rows = []
        for turn in range(arguments.rounds + 1):  # the first round is a warm-up
            requests = {
                i: wire.Request(key=str(i), ids=tuple(map(int, rng.integers(4, 32000, arguments.prompt_tokens))), seed=turn * 1000 + i,
                                n=arguments.n, max_tokens=arguments.completion)
                for i in range(arguments.prompts)
            }  # fmt: skip
            question = GenerationRequest(requests, wire.Sampling(), version=1)
            before, begun = (time.process_time(), sum_cpu_seconds(speakers), sum_cpu_seconds(engines)), time.monotonic()
            question.ask(server_group)
            assert question.wait() == 0
            wall = time.monotonic() - begun
            spent = np.array((time.process_time(), sum_cpu_seconds(speakers), sum_cpu_seconds(engines))) - before
            tokens = sum(len(one.tokens) for drawn in question.answers.values() for one in drawn)
            rows += [(wall, *spent, tokens)] if turn else []
        wall, client, speaker, engine, tokens = np.array(rows).T
        every = client + speaker + engine
        table = Table("", "median (from, to)", title=f"{arguments.prompts} prompts, {arguments.n} completions each, {len(rows)} rounds")
        for name, values, form in [
            ("client, CPU s", client, ".3f"), ("HTTP process, CPU s", speaker, ".3f"), ("engine, CPU s", engine, ".3f"),
            ("wall s", wall, ".3f"), ("tokens", tokens, ",.0f"), ("client, of all CPU", client / every, ".1%"),
            ("client and HTTP process, of all CPU", (client + speaker) / every, ".1%"), ("engine idle, of wall", 1 - engine / wall, ".1%"),
        ]:  # fmt: skip
            table.add_row(name, f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})")
        console.print(table)
    finally:
        server.close()


if __name__ == "__main__":
    main()
