"""Compare agents with sampling the same contexts in one batch: the cost of the agents' endpoint in CPU seconds and engine steps.

    python benchmarks/agents.py --episodes 64 --turns 10 --tokens 64 --rounds 3

The agents run in another process, each with one connection, and send the next request as soon as they have an answer. The figures are those
of this process: engine, endpoint, matching and rendering, with a tiny model. Both ways sample the same number of tokens in the same
contexts, because every turn has exactly `--tokens` tokens: a truncated turn counts as complete. The prefix cache is enabled in both.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


async def run_agents(turns: int) -> None:
    """Play an episode for each line `port key` of standard input, and print its key at the end. Runs in the other process."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    playing = set()

    async def play(port: str, key: str) -> None:
        messages = [{"role": "user", "content": "What is it?"}]
        incoming, outgoing = await asyncio.open_connection("127.0.0.1", int(port))
        for _ in range(turns):
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            outgoing.write(head.encode() + body)
            head = (await incoming.readuntil(b"\r\n\r\n")).decode().lower()
            answer = json.loads(await incoming.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0])))
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "again"}]
        outgoing.close()
        print(key, flush=True)

    while line := await reader.readline():
        task = asyncio.create_task(play(*line.decode().split()))
        playing.add(task)
        task.add_done_callback(playing.discard)


def main() -> None:
    """Write a tiny model and run the benchmark, or the agents' process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("episodes", 64), ("turns", 10), ("tokens", 64), ("rounds", 3), ("hidden", 128), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agents:
        return asyncio.run(run_agents(args.turns))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from tests.chat_models import write_chat

    with tempfile.TemporaryDirectory() as folder:
        path = write_chat(Path(folder) / "model", ends=0.0, hidden=args.hidden, layers=args.layers, ffn=3 * args.hidden, max_positions=8192)
        measure(path, args)


def start_agents(turns: int):
    """Return an agent function whose episodes another process plays."""
    command = [sys.executable, __file__, "--agents", "--turns", str(turns)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    ended: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}

    def read() -> None:
        for line in process.stdout:
            loop, future = ended.pop(line.strip())
            loop.call_soon_threadsafe(future.set_result, None)

    async def solve(row, endpoint):
        loop = asyncio.get_running_loop()
        ended[endpoint.api_key] = loop, loop.create_future()
        process.stdin.write(f"{endpoint.url.rpartition(':')[2]} {endpoint.api_key}\n")
        await ended[endpoint.api_key][1]
        return 1.0

    threading.Thread(target=read, daemon=True).start()
    return solve


def measure(path: Path, args: argparse.Namespace) -> None:
    """Print tokens, engine steps, CPU seconds and wall-clock seconds of both ways, and the ratio of their CPU seconds.

    Args:
        path: Path of the model.
        args: Arguments of the command line.
    """
    from megatron_grpo.core.rollout.colocated import ColocatedEngine
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.rollout.turns import EngineTurnSampler
    from megatron_grpo.core.settings import RolloutConfig
    from megatron_grpo.core.types import Prompt
    from megatron_grpo.plugins.environments.agent_programs import AgentEnvironment
    from megatron_grpo.plugins.environments.agent_session import SessionLimits
    from megatron_grpo.plugins.environments.agents import AgentLoop, AgentRunnerFactory
    from megatron_grpo.plugins.environments.tools import read_hermes
    from megatron_grpo.plugins.environments.trajectory import ChatTemplate
    from tests.chat_models import chat_tokenizer

    class FixedLengthSampler(EngineTurnSampler):
        """Sampler whose turns all have `--tokens` tokens."""

        def submit(self, key, token_ids, *, seed, max_tokens):
            asked.append((tuple(token_ids), seed))
            super().submit(key, token_ids, seed=seed, max_tokens=args.tokens)

        def poll(self):
            steps[0] += bool(self.num_running)
            return [(key, dataclasses.replace(sampled, is_cut=False)) for key, sampled in super().poll()]

    cfg = RolloutConfig(vllm_kv_cache_memory_mb=1024, vllm_max_num_seqs=args.episodes)
    engine = ColocatedEngine.build(cfg, model_path=path, dtype="float32", max_model_len=8000, seed=0, rank=0, world_size=1)
    question = [{"role": "user", "content": "What is it?"}]
    prompts = [Prompt(number=i, row=i, raw=question, token_ids=(1, 2), columns={}) for i in range(args.episodes // 8)]
    solve = start_agents(args.turns)
    stage = AgentRunnerFactory(
        agent=type("Agent", (AgentEnvironment,), {"solve": staticmethod(solve), "timeout_of_call": 600.0}),
        template=ChatTemplate(chat_tokenizer(), end_ids=[2]), system=None, timeout=600.0, concurrency=args.episodes, needs_reward=True,
        reader=lambda tools: read_hermes,
        limits=SessionLimits(max_model_len=8000, max_completion_length=1_000_000, max_turns=args.turns, max_contexts=1),
    )  # fmt: skip
    sampling = SamplingSettings(n=8, max_completion_length=args.tokens)

    def run_episodes() -> int:
        asked.clear()
        player, turns = AgentLoop(stage, prompts, sampling, seed=0), FixedLengthSampler(engine._llm.llm_engine, sampling, version=0)
        while not player.advance(turns, 10.0, version=0):
            pass
        rows = [one for group in player.groups() for one in group.completions]
        assert {row.finish_reason for row in rows} == {"done"}, {row.record.numbers.fault for row in rows}
        return sum(row.num_sampled for row in rows)

    def run_batch() -> int:
        turns = EngineTurnSampler(engine._llm.llm_engine, sampling, version=0)
        for index, (token_ids, seed) in enumerate(asked):
            turns.submit((index, 0), token_ids, seed=seed, max_tokens=args.tokens)
        count = 0
        while turns.num_running:
            steps[0] += 1
            count += sum(len(sampled.token_ids) for _, sampled in turns.poll())
        return count

    asked: list[tuple[tuple[int, ...], int]] = []
    steps = [0]
    run_episodes(), run_batch()  # warm-up
    for round_ in range(args.rounds):
        found = {}
        for name, work in (("agents", run_episodes), ("batch", run_batch)):
            engine._forget_prefixes()
            steps[0], began, wall = 0, time.process_time(), time.monotonic()
            tokens = work()
            found[name] = time.process_time() - began
            print(f"round {round_ + 1}, {name}: {tokens:,} tokens, {steps[0]} engine steps, {found[name]:.2f} CPU s, "
                  f"{time.monotonic() - wall:.2f} s")  # fmt: skip
        print(f"round {round_ + 1}: agents have {found['batch'] / found['agents']:.2f} of the speed of one batch (CPU seconds)")


if __name__ == "__main__":
    main()
