"""Dumps for the referee: by the real TRL and the hook of its page, and by writers of the other systems."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.reference.packing import MAX_COMPLETION_LENGTH, random_batch

DOCS = Path(__file__).parents[1] / "docs"
G = 4


def hook_of(system: str) -> str:
    """The program on a system's page."""
    return re.search(r"```python\n(.*?)```", (DOCS / f"referee_{system}.md").read_text(), re.DOTALL)[1]


def spoiled(base: type, faults: dict[str, tuple[str, str]]) -> type:
    """A class with copies of TRL's own methods, in which some text is replaced: method -> (text, text instead)."""
    from trl.trainer import grpo_trainer

    body = ""
    for method, (text, instead) in faults.items():
        source = inspect.getsource(getattr(grpo_trainer.GRPOTrainer, method))
        assert text in source, f"TRL's {method} has no {text!r}"
        body += source.replace(text, instead)
    made: dict = {}
    exec(f"class Spoiled(Base):\n{body}", vars(grpo_trainer) | {"Base": base}, made)
    return made["Spoiled"]


def trainer_class(faults: dict[str, tuple[str, str]]) -> type:
    """TRL's trainer on tables of log-probs, with faults, under the hook of the page."""
    from tests.unit.grpo.test_against_trl import TablesForAModel

    class OfRows(TablesForAModel):
        """The first token of a prompt says which row it is."""

        def _generate(self, prompts):
            _, *others = super()._generate(prompts)
            return [[100 + i] for i in range(len(prompts))], *others

        def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
            rows = (input_ids[:, 0] - 100).long()
            found = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
            width = input_ids.shape[1] - 1
            return [None if one is None else one[rows][:, :width] for one in found]

    made = {"GRPOTrainer": spoiled(OfRows, faults) if faults else OfRows}
    source = hook_of("trl").replace("from trl import GRPOTrainer\n", "")
    exec(source, made)
    return made["DumpingGRPOTrainer"]


def trl_dump(folder: Path, seed: int, *, micro_batches: int = 1, faults=None, rewards=None, rows: int = 16, dtype=torch.float32, funcs=2,
             weights=None, share_on_policy=0.0, fresh=False, **settings) -> Path:  # fmt: skip
    """One optimizer step of TRL's own code with its hook; returns the folder of its files."""
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    completions = random_batch(seed, rows, share_on_policy=share_on_policy, dtype=torch.float32)
    for c in completions:
        c.mask[0], c.is_zero_std = 1.0, False
        for name in ("mask", "logp", "entropy", "sampler_logp", "ref_logp", "old_logp"):
            array = getattr(c, name)
            if array is not None:
                setattr(c, name, array.detach().to(dtype).requires_grad_(name in ("logp", "entropy")))
        c.is_truncated = len(c.mask) == max(len(one.mask) for one in completions)
    rng = np.random.default_rng([seed, 7])
    weights = weights or [1.0, 0.5][:funcs]
    rewards = np.round(rng.normal(size=(rows, funcs)), 2).astype(np.float32) if rewards is None else rewards
    trainer = trainer_class(faults or {})(completions, rewards, weights, **settings)
    trainer.args.output_dir, trainer.state = str(folder), SimpleNamespace(global_step=0)
    trainer._step, trainer.num_iterations = 0 if fresh else micro_batches, 2
    trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = (
        micro_batches
    )
    trainer.args.per_device_train_batch_size = rows // micro_batches
    trainer.args.gradient_accumulation_steps = 2 * micro_batches
    if share_on_policy < 1:
        trainer.args.gradient_accumulation_steps = 2 * micro_batches + 1  # makes TRL ask for old log-probs
    torch.manual_seed(seed)
    out = trainer._generate_and_score_completions([{"prompt": ""} for _ in completions])
    batches = split_tensor_dict(shuffle_sequence_dict(out), micro_batches)
    for batch in batches:
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        trainer._step += 1
    return folder / "referee"


__all__ = ["MAX_COMPLETION_LENGTH"]
