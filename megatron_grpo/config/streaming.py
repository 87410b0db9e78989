"""What goes with a data set that is read as the run goes: nobody knows how many rows it has, nor how long they are, before they come."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.config import Config
from megatron_grpo.config.read import COMMAND_LINE
from megatron_grpo.config.tuner import Pair


def pairs(cfg: Config) -> Iterator[Pair]:
    data = cfg.data
    if not data.streaming:
        if cfg.sources.get("shuffle_buffer_size") == COMMAND_LINE:  # a file that a run has written has every setting
            message = f"shuffle_buffer_size ({data.shuffle_buffer_size}) does nothing without streaming true. Give that, or leave it out."
            yield ("shuffle_buffer_size", "streaming"), message, {"streaming": [True]}
        return
    if cfg.run.max_steps is None:
        epochs = "an epoch" if cfg.run.num_train_epochs is None else f"num_train_epochs ({cfg.run.num_train_epochs:g})"
        yield (
            ("max_steps", "streaming"),
            f"streaming reads rows as the run goes, so nobody knows how many optimizer steps {epochs} is. Give "
            f"max_steps{_of_prompts(cfg)}.",
            {"streaming": [False]},
        )
    if data.dataset_drop_last:
        message = "streaming does not know where an epoch ends before it does, so steps and rollouts go on into the next one. Leave \
dataset_drop_last out."
        yield ("dataset_drop_last", "streaming"), message, {"dataset_drop_last": [False], "streaming": [False]}
    if data.max_prompt_length is None:
        yield (
            ("max_prompt_length", "streaming"),
            "streaming reads rows as the run goes, and the sampler is made for the longest prompt before the first one comes. Give "
            "max_prompt_length; truncation_strategy says what becomes of longer ones.",
            {"streaming": [False]},
        )
    if data.split_dataset_ratio:
        yield (
            ("split_dataset_ratio", "streaming"),
            f"split_dataset_ratio ({data.split_dataset_ratio:g}) is a share of all rows, and streaming does not know how many there are. "
            "Name rows that are held out in eval_dataset.",
            {"split_dataset_ratio": [0.0], "streaming": [False]},
        )


def _of_prompts(cfg: Config) -> str:
    """What a step trains, where the settings say it by themselves."""
    rows, group = cfg.batch.global_batch_size, cfg.batch.num_generations
    if not rows or not group:
        return ""
    return f": each step trains {rows} / {group} = {rows / group:g} prompts, so that max_steps 1000 is {1000 * rows / group:,.0f} of them"
