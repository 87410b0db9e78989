"""Metrics of a rollout's rewards and lengths, and a table of its completions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.core.grpo.advantages import Advantages, mean, reward_metrics, rewards_per_func, total_rewards
from megatron_grpo.core.images import num_tokens
from megatron_grpo.core.metadata import GroupMetadata, Progress
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.collectives import Node
from megatron_grpo.core.trainer.scored_rollout import ScoredRollout
from megatron_grpo.core.types import FAULTS, EpisodeRecord, Group, Prompt, ScoredGroup
from megatron_grpo.run.metrics.records import BestEffort, write_table


def rollout_stats(
    rollouts: Sequence[ScoredRollout], reward_names: Sequence[str], *, selection_weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Return the metrics of the rollouts of one optimizer step, named and defined as in TRL, over all their completions.

    Args:
        reward_names: Name of each reward function.
        selection_weights: Weight of each reward function if rollouts select among the sampled groups, else None.
    """
    metas = [meta for rollout in rollouts for meta in rollout.result.kept]
    lengths = np.array([length for meta in metas for length in meta.num_sampled])
    is_clipped = np.array([clipped for meta in metas for clipped in meta.is_truncated])
    stats = reward_metrics(Advantages.from_parts([rollout.advantages for rollout in rollouts]), reward_names) | {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(is_clipped.mean()),
        "sampling/refused_completions": sum(sum(meta.is_refused) for rollout in rollouts for meta in rollout.result.sampled),
    }
    if any(meta.mask_sizes for meta in metas):
        stats |= {
            "sampling/mask_size": sum(sum(meta.mask_sizes) for meta in metas) / max(int(lengths.sum()), 1),
            "sampling/mask_size_max": max(meta.max_mask_size for meta in metas),
        }
    if any(meta.episodes for meta in metas):
        stats |= episode_stats(metas)
    for rollout in rollouts:
        stats |= rollout.partial.metrics if rollout.partial else {}
    if penalties := [rollout.penalty for rollout in rollouts if rollout.penalty is not None]:
        stats["kl_in_reward"] = float(np.concatenate(penalties).mean())
    return stats | (selection_stats(rollouts, selection_weights) if selection_weights is not None else {})


def episode_stats(metas: Sequence[GroupMetadata]) -> dict[str, float]:
    """Return means over episodes, failed ones included; `episodes/failed` counts those. With tools, TRL's names are added.

    Args:
        metas: Metadata of the groups of all ranks.
    """
    episodes = [episode for meta in metas for episode in meta.episodes]
    contexts = [tokens for meta in metas for tokens in meta.contexts]
    sampled, count = sum(sum(meta.num_sampled) for meta in metas), len(episodes)
    stats: dict[str, float] = {
        "episodes/turns": sum(episode.num_turns for episode in episodes) / count,
        "episodes/turns_max": max(episode.num_turns for episode in episodes),
        "episodes/failed": sum(episode.finish_reason in FAULTS for episode in episodes),
        "episodes/rewritten": sum(len(tokens) > 1 for tokens in contexts) / count,
        "episodes/drawn_tokens": sampled / count,
        "episodes/masked_token_share": 1 - sampled / sum(map(sum, contexts)),
        "episodes/environment_seconds": sum(episode.seconds for episode in episodes) / count,
    }
    for end in ENDS:
        stats[f"episodes/ended/{end}"] = sum(episode.finish_reason == end for episode in episodes) / count
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        stats[name if name.startswith("agent/") else f"environment/{name}"] = (
            sum(episode.metrics.get(name, 0.0) for episode in episodes) / count
        )
    if "environment/tool_calls" in stats:
        calls, errors = stats["environment/tool_calls"], stats["environment/tool_errors"]
        stats |= {"tools/call_frequency": calls, "tools/failure_frequency": errors / calls if calls else 0.0}
    return stats


ENDS = ("done", "max_turns", "length", "max_seconds", *FAULTS)


def selection_stats(rollouts: Sequence[ScoredRollout], reward_weights: Sequence[float]) -> dict[str, float]:
    """Return the metrics of dynamic sampling.

    The kept groups are not a fair sample of the policy's completions; `dynamic_sample/reward` is over everything that was sampled.

    Args:
        reward_weights: Weight of each reward function.
    """
    results = [rollout.result for rollout in rollouts]
    sampled = [meta for result in results for meta in result.sampled]
    rewards = total_rewards(rewards_per_func([meta.rewards for meta in sampled], len(reward_weights)), reward_weights)
    return {
        "dynamic_sample/rounds": sum(result.num_rounds for result in results),
        "dynamic_sample/groups_sampled": len(sampled),
        "dynamic_sample/zero_std_groups_replaced": sum(result.num_zero_std_dropped for result in results),
        "dynamic_sample/prompts_given_back": sum(result.num_given_back for result in results),
        "dynamic_sample/reward": mean(rewards).item(),
    }


Table = dict[str, list[Any]]  # by column, one value per completion


class Completions:
    """Writer of `completions/step_*.parquet`: one file per rollout, one row per completion.

    The number in the name is the version of the weights that sampled the rollout; a second rollout with the same weights ends in `_1`.
    A job on several nodes has a directory of that name, with one file per node. Text never leaves its node: the first rank of a node writes
    the completions that the ranks of the node scored.

    Args:
        reward_names: Name of each reward function.
        interval: Write every `interval`-th rollout; 0 for never.
        most_nodes: Number of nodes that write a rollout. If there are more nodes, they take turns.
        write_table: Callback (version, table), called on rank 0 with the rows of its node for every rollout that is due.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        reward_names: Sequence[str],
        interval: int = 1,
        rank: int = 0,
        node: Node = Node(),  # noqa: B008 - it is frozen
        most_nodes: int | None = None,
        write_table: Callable[[int, Table], None] | None = None,
    ):
        self.output_dir = Path(output_dir)
        self.directory = self.output_dir / "completions"
        self.reward_names, self.every, self.rank, self.node = tuple(reward_names), interval, rank, node
        self.most_nodes = most_nodes or node.count
        self._write_table = write_table
        self._latest = (-1, 0)  # (version, number of its rollouts that were due)
        self._best_effort = BestEffort()

    def start(self, progress: Progress) -> None:
        """Delete the tables of rollouts that a resumed run has not sampled yet."""
        if self.rank == 0:
            for path in self.directory.glob("step_*"):
                match = re.fullmatch(r"step_(\d{6,})(_\d+)?(\.parquet)?", path.name)  # leave other files alone
                if match and int(match[1]) >= progress.step and path.is_dir() != bool(match[3]) and not _is_in_checkpoint(path, progress):
                    _remove(path)

    def write(self, rollout: ScoredRollout) -> Path | None:
        """Write a rollout if it is due. Collective: each rank provides the groups it scored.

        A table that cannot be written causes a warning, because the run does not need it.

        Returns:
            The file, on the rank that wrote it; None elsewhere.
        """
        if not self.every or rollout.number % self.every:
            return None
        # Rollouts that overlap may share their oldest version; they never share the version at which they arrive.
        version = rollout.partial.version if rollout.partial else rollout.result.kept[0].version
        number = self._latest[1] if self._latest[0] == version else 0
        self._latest = (version, number + 1)
        name = f"step_{version:06d}{f'_{number}' if number else ''}"
        writes = self._has_its_turn(rollout.number // self.every)
        is_wanted = writes or (self.node.number == 0 and self._write_table is not None)
        local = [self._columns(index, group, rollout) for index, group in rollout.local_groups.items()] if is_wanted else []
        groups = [columns for part in collectives.exchange({self.node.first: local} if local else {}) for columns in part]
        if not groups:
            return None
        groups.sort(key=lambda columns: columns["prompt_number"][0])
        table = join_columns(groups)
        if self.rank == 0 and self._write_table is not None:
            self._write_table(version, {name: column for name, column in table.items() if name not in TOKENS})
        if not writes:
            return None
        file = f"{name}.parquet" if self.node.count == 1 else f"{name}/node_{self.node.number:05d}.parquet"
        with self._best_effort(f"the table of completions in {self.directory}"):
            write_table(self.directory / file, table)
            return self.directory / file
        return None

    def _has_its_turn(self, turn: int) -> bool:
        return (self.node.number - turn * self.most_nodes) % self.node.count < self.most_nodes

    def _columns(self, index: int, scored: ScoredGroup, rollout: ScoredRollout) -> dict[str, list[Any]]:
        """Return the rows of one group, by column."""
        group, advantages = scored.group, rollout.advantages
        completions = group.completions
        columns: dict[str, list[Any]] = {
            "rollout": [rollout.number] * len(completions),
            "version": [completion.version for completion in completions],
            "prompt_number": [group.prompt.number] * len(completions),
            **({"versions": [list(map(list, completion.versions)) for completion in completions]} if rollout.partial else {}),
            **text_columns(group),
            "reward": _nullable(advantages.rewards[index]),
        }
        for k, name in enumerate(self.reward_names):
            columns[f"rewards/{name}"] = _nullable(advantages.rewards_per_func[index, :, k])
        return columns | {"advantage": _nullable(advantages.advantages[index]), **count_columns(group), **token_columns(group)}


def _make_episode_columns(records: Sequence[EpisodeRecord]) -> dict[str, list[Any]]:
    """Return the columns of episodes. `messages` shows their turns one by one, beside the text in `completion`."""
    if not records:
        return {}
    return {
        "messages": [_text([_cut(message) for message in episode.messages]) for episode in records],
        "num_turns": [episode.numbers.num_turns for episode in records],
        "turn_rewards": [list(episode.turn_rewards) for episode in records],
        "fault": [episode.numbers.fault for episode in records],
        "environment_seconds": [episode.numbers.seconds for episode in records],
    }


MOST_CHARACTERS = 100_000  # of one message in the table: an environment may return 10 MB


def _cut(message: Mapping[str, Any]) -> Mapping[str, Any]:
    text = message.get("content")
    if not isinstance(text, str) or len(text) <= MOST_CHARACTERS:
        return message
    return {**message, "content": f"{text[:MOST_CHARACTERS]} ... ({len(text):,} characters)"}


def join_columns(groups: Sequence[Table]) -> Table:
    """Concatenate the columns of all groups. The column `images` is dropped if no prompt has an image.

    Args:
        groups: Columns of each group.
    """
    table = {name: [value for columns in groups for value in columns[name]] for name in (groups[0] if groups else {})}
    return {name: values for name, values in table.items() if name != "images" or any(values)}


def text_columns(group: Group) -> dict[str, list[Any]]:
    """Return the columns with a group's prompt and completions."""
    completions = group.completions
    return {
        "dataset_row": [group.prompt.row] * len(completions),
        "generation": list(range(len(completions))),
        "prompt": [_text(group.prompt.raw)] * len(completions),
        "images": [_images(group.prompt)] * len(completions),
        "completion": [completion.text for completion in completions],
    }


def count_columns(group: Group) -> dict[str, list[Any]]:
    """Return the columns with lengths, finish reasons and episodes of a group."""
    completions = group.completions
    return {
        "num_prompt_tokens": [len(group.prompt.token_ids)] * len(completions),
        "num_completion_tokens": [completion.num_sampled for completion in completions],
        "finish_reason": [completion.finish_reason for completion in completions],
        **_make_episode_columns([completion.record for completion in completions if completion.record is not None]),
    }


TOKENS = ("token_ids", "sampler_logprobs")  # columns not meant for people


def token_columns(group: Group) -> dict[str, list[Any]]:
    """Return the columns that `megatron-grpo mismatch` compares with the trainer: token IDs and the sampler's log-probs.

    Log-probs are NaN at tokens that were not sampled. Both are None for a completion with several contexts or with images.
    """
    plain = [
        completion if len(completion.sequence.starts) == 1 and not completion.sequence.images else None for completion in group.completions
    ]
    return {
        "token_ids": [completion and completion.sequence.token_ids.astype(np.int32) for completion in plain],
        "sampler_logprobs": [
            completion and np.where(completion.sequence.mask, completion.logprobs, np.float32("nan")) for completion in plain
        ],
    }


def _is_in_checkpoint(path: Path, progress: Progress) -> bool:
    """Return whether the checkpoint contains the rollout of a table, though its own step has not been taken."""
    import pyarrow
    import pyarrow.parquet

    try:
        [number] = set(pyarrow.parquet.read_table(path, columns=["rollout"])["rollout"].to_pylist())
    except (OSError, ValueError, KeyError, pyarrow.ArrowException):
        return False
    return number < progress.num_rollouts


def _remove(path: Path) -> None:
    """Delete a table, or the tables of a directory, and the directory if it is then empty."""
    if not path.is_dir():
        path.unlink()
        return
    for table in [*path.glob("node_*.parquet"), *path.glob(".node_*.parquet.new")]:
        table.unlink()
    if not any(path.iterdir()):
        path.rmdir()


def _text(raw: Any) -> str:
    """Return a prompt as one string: chat messages as JSON."""
    return raw if isinstance(raw, str) else json.dumps([dict(message) for message in raw], ensure_ascii=False, default=str)


def _images(prompt: Prompt) -> str:
    """Return the images of a prompt in order: their files and numbers of tokens."""
    return ", ".join(f"{getattr(image, 'name', image.key)} ({num_tokens(image)} tokens)" for _, image in prompt.images)


def _nullable(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in np.asarray(values, dtype=np.float64).ravel()]
