"""One rank of a job of any size, with simulated other ranks, for tests of what it receives and holds.

All ranks behave alike, so the data of another rank is derived from this one's. `World` replaces `parallel.collectives` and counts pickled
bytes; `World.real` counts the same on real ranks, which validates the simulation.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np


def count_bytes(value: Any) -> int:
    return len(pickle.dumps(value, protocol=5))


@dataclass
class SimulatedCollectives:
    """Simulated collectives.

    size, rank: of the simulated rank. sent, received: bytes by purpose. sent_to: ranks in exchanges.
    """

    size: int
    rank: int
    per_node: int = 8  # ranks
    is_real: bool = False
    sent_to: dict[str, set[int]] = field(default_factory=dict)
    sent: Counter = field(default_factory=Counter)
    received: Counter = field(default_factory=Counter)
    what: str = ""
    others: Callable[[int, Any], Any] = lambda source, value: value  # (rank, what this one hands in) -> what that one hands in
    incoming: Callable[[], dict[int, Any]] = dict  # rank -> what it sends to this one in an exchange

    @contextlib.contextmanager
    def named(self, what: str, *, others=None, incoming=None) -> Iterator[None]:
        """Count bytes within the context under this purpose."""
        before = self.what, self.others, self.incoming
        self.what, self.others, self.incoming = what, others or (lambda source, value: value), incoming or dict
        try:
            yield
        finally:
            self.what, self.others, self.incoming = before

    def all_gather_object(self, value: Any, group: Any = None) -> list[Any]:
        found = self._real["all_gather_object"](value) if self.is_real else [
            value if source == self.rank else self.others(source, value) for source in range(self.size)
        ]  # fmt: skip
        self.sent[self.what] += count_bytes(value)
        self.received[self.what] += sum(count_bytes(one) for source, one in enumerate(found) if source != self.rank)
        return found

    def exchange(self, parts: dict[int, Any]) -> list[Any]:
        self.sent[self.what] += sum(count_bytes(part) for to, part in parts.items() if to != self.rank)
        self.sent_to.setdefault(self.what, set()).update(parts.keys() - {self.rank})
        if self.is_real:
            found = self._real["exchange"](parts)
            self.received[self.what] += sum(count_bytes(part) for part in found if part is not parts.get(self.rank))
            return found
        sent = self.incoming()
        self.received[self.what] += sum(count_bytes(part) for part in sent.values())
        return [part for _, part in sorted({**sent, **({self.rank: parts[self.rank]} if self.rank in parts else {})}.items())]

    @contextlib.contextmanager
    def stands_in(self) -> Iterator[SimulatedCollectives]:
        from megatron_grpo.core.parallel import collectives

        mine: dict[str, Any] = {"all_gather_object": self.all_gather_object, "exchange": self.exchange}
        if not self.is_real:
            mine |= {"rank": lambda: self.rank, "num_ranks": lambda group=None: self.size, "has_job": lambda: True}
            # the others say the same
            mine |= {"all_reduce_max": lambda number: number, "all_reduce_any": list, "barrier_with_timeout": lambda: None}
        self._real = {name: getattr(collectives, name) for name in mine}
        for name, function in mine.items():
            setattr(collectives, name, function)
        try:
            yield self
        finally:
            for name, function in self._real.items():
                setattr(collectives, name, function)


class Scorer:
    """The part of a policy that `SampleBuffer.with_old_logprobs` uses."""

    def old_logprobs(self, micro_batches):
        return [np.zeros(len(micro.targets), dtype=np.float32) for micro in micro_batches], None


def token_weight_fn(num_masked, *, is_truncated, is_zero_std):
    return SimpleNamespace(row_weights=np.ones(len(num_masked)), num_sequences=len(num_masked), num_loss_tokens=sum(num_masked))


class Prompts:
    """Numbered prompts of equal content."""

    taken = 0

    def take(self, count: int) -> list[Any]:
        self.taken += count
        return [prompt(number) for number in range(self.taken - count, self.taken)]

    def give_back(self, count: int) -> None:
        self.taken -= count


def prompt(number: int):
    from megatron_grpo.core.types import Prompt

    return Prompt(number=number, row=number, raw="a question", token_ids=tuple(range(16)), columns={})


def right(completions):
    return [float(place % 2) for place in range(len(completions))]


class SimulatedRank:
    """The simulated rank, and the data that other ranks send to it.

    Rows are distributed one by one, so groups are split and almost all tokens are sent. length: tokens per completion. groups: prompts of
    the rollout over all ranks.
    """

    def __init__(self, world: SimulatedCollectives, folder: Any, *, length: int, groups: int, group_size: int = 2):
        from megatron_grpo.core.batching.split import BatchPartitioner
        from megatron_grpo.core.parallel.layout import Layout

        self.world, self.folder, self.length, self.groups, self.group_size = world, folder, length, groups, group_size
        self.num_rows, self.me = groups * group_size, world.rank
        self.cut = BatchPartitioner(dp_size=world.size, micro_batch_size=1)
        layout = Layout(world_size=world.size)
        self.parallel: Any = SimpleNamespace(
            layout=layout, rank=self.me, dp_rank=self.me, is_model_parallel_src=True, from_last_stage=lambda mine: mine
        )
        self.drawn, self.logprobs = np.arange(100_000, 100_000 + length), -np.linspace(0.1, 0.9, length)
        self.on_pre_optimizer_step: list[Any] = []

    def answer(self, prompt: Any, place: int, version: int):
        from megatron_grpo.core.rollout.engine import make_completion

        text = self.make_text(prompt.number, place)
        return make_completion(prompt.token_ids, self.drawn, self.logprobs, text=text, finish_reason="stop", version=version)

    def make_text(self, number: int, place: int) -> str:
        """Return a unique text: pickle writes a repeated string once."""
        return f"{number:06d} {place} {'word ' * self.length}"

    def judged_by(self, source: int) -> range:
        """Return the prompts that a rank scores, as the scripted engine distributes them."""
        return range(source, self.groups, self.world.size)

    def gather_metadata(self, source: int, mine: Any) -> Any:
        if not (isinstance(mine, list) and mine and hasattr(mine[0], "prompt_number")):
            return mine  # sentences, notices: none
        return [replace(mine[0], prompt_number=number) for number in self.judged_by(source)]

    def completions_sent_here(self) -> dict[int, Any]:
        """Return rows of this rank, from the ranks that scored them."""
        here: dict[int, list[Any]] = {}
        for row in range(self.num_rows):
            number, place = divmod(row, self.group_size)
            source = number % self.world.size
            if self.cut.find_dp_rank(row) == self.me and source != self.me:
                here.setdefault(source, []).append(((0, row), self.answer(prompt(number), place, 0)))
        return here

    def tables_sent_here(self) -> dict[int, Any]:
        """Return the columns that the other ranks of this node have scored."""
        per_node = self.world.per_node
        if self.me % per_node:
            return {}
        from megatron_grpo.run.metrics.rollout import TOKENS

        one = self.on_pre_optimizer_step[-1]
        columns = self.completions._columns(0, next(iter(one.local_groups.values())), one)
        found: dict[int, Any] = {}
        for mate in range(self.me + 1, min(self.me + per_node, self.world.size)):
            for number in self.judged_by(mate):
                numbers = {name: [number] * self.group_size for name in ("prompt_number", "dataset_row")}
                texts = {"completion": [self.make_text(number, place) for place in range(self.group_size)]}
                tokens = {name: [one.copy() for one in columns[name]] for name in TOKENS}  # as with strings, pickle writes one array once
                found.setdefault(mate, []).append({**columns, **numbers, **texts, **tokens})
        return found

    def scatter(self, real: Any) -> Any:
        """Replace `sample_buffer.move_to_dp_ranks`, with the rows of other ranks."""

        def scatter(items, rows, to, parallel):
            theirs: dict[int, list[Any]] = {}
            moved = rows.take(np.flatnonzero((to == self.me) & (rows.dp_rank != self.me)))
            for key, source in zip(moved.keys, moved.dp_rank.tolist(), strict=True):
                theirs.setdefault(source, []).append((key, replace(next(iter(items.values())), row=key[1])))
            with self.world.named(self.world.what, incoming=lambda: theirs):
                return real(items, rows, to, parallel)

        return scatter

    def logger(self):
        from megatron_grpo.core.base.activity import Timers
        from megatron_grpo.core.parallel import collectives
        from megatron_grpo.run.metrics.display import Display
        from megatron_grpo.run.metrics.metrics_logger import MetricsLogger
        from megatron_grpo.run.metrics.rollout import Completions

        rank = self

        class RecordingCompletions(Completions):
            def write(self, one):
                rank.on_pre_optimizer_step.append(one)
                with rank.world.named("completions", incoming=rank.tables_sent_here):
                    return super().write(one)

        number = self.me // self.world.per_node
        node = collectives.Node(first=number * self.world.per_node, number=number, count=-(-self.world.size // self.world.per_node))
        self.completions = RecordingCompletions(self.folder, reward_names=["right"], rank=self.me, node=node)
        return MetricsLogger(self.completions, Display(folder=self.folder), timers=Timers(), config={})


def simulate_rollout_and_two_steps(world: SimulatedCollectives, folder: Any, **sizes: int) -> dict[str, dict[str, int]]:
    """Return {"sent", "received", "held": {purpose: bytes}} of one rank for a rollout and two optimizer steps.

    sizes: arguments of `OneRank`.
    """
    from megatron_grpo.core.base.activity import Timers
    from megatron_grpo.core.batching.batch_sizes import BatchSizes
    from megatron_grpo.core.batching.schedule import TrainingSchedule
    from megatron_grpo.core.metadata import Progress
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.settings import GrpoConfig
    from megatron_grpo.core.trainer import sample_buffer as rows_that_wait
    from megatron_grpo.core.trainer.generation import RolloutGenerator
    from megatron_grpo.core.trainer.rollouts import Rollouts
    from megatron_grpo.core.trainer.sample_buffer import SampleBuffer
    from megatron_grpo.run.rewards.protocol import RewardFunction
    from megatron_grpo.run.rewards.reward_manager import RewardManager
    from tests.scripted_engine import ScriptedEngine

    one = SimulatedRank(world, folder, **sizes)
    rows, cut, parallel, held = one.num_rows, one.cut, one.parallel, {}
    table = TrainingSchedule(
        BatchSizes(layout=parallel.layout, global_batch_size=rows // 2, generation_batch_size=rows, num_generations=one.group_size)
    )
    with world.stands_in():
        logger = one.logger()
        judge = RewardManager([RewardFunction(name="right", function=right, timeout=60, on_error="raise")])
        sampling = SamplingSettings(n=one.group_size, max_completion_length=one.length)
        rollouts = Rollouts(
            RolloutGenerator(ScriptedEngine(one.answer), judge, sampling=sampling, seed=0, timers=Timers(), sync_again=lambda: None),
            Prompts(), cfg=GrpoConfig(), schedule=table, policy=SimpleNamespace(cut=cut, parallel=parallel), logger=logger,
        )  # fmt: skip
        real = rows_that_wait.move_to_dp_ranks
        rows_that_wait.move_to_dp_ranks = one.scatter(real)
        try:
            with world.named("verdicts, and rows to their homes", others=one.gather_metadata, incoming=one.completions_sent_here):
                pending = SampleBuffer(parallel=parallel, cut=cut).add(rollouts.sample([0]))
            for number in (0, 1):
                step = table.step(number)
                with world.named("anchors"):
                    pending = pending.with_old_logprobs(Scorer(), step)
                with world.named("batch"):
                    pending, batch = pending.batch(step, token_weight_fn=token_weight_fn)
                held = held or {
                    "samples": sum(count_bytes(sample) for sample in pending.samples.values()),
                    "micro-batches": count_bytes(batch.micro_batches),
                    "rows": count_bytes(pending.rows),
                }
                pending = pending.after(step, {})
                with world.named("journal"):
                    logger.step(Progress(step=number + 1), batch, {})
        finally:
            rows_that_wait.move_to_dp_ranks = real
            logger.close(summary=False)
    return {"sent": dict(world.sent), "received": dict(world.received), "held": held}
