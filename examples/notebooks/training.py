# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train from a notebook
# A tiny model adds two-digit numbers and forgets the carry. This notebook trains it on two processes. Run
# `bash examples/quickstart/run.sh` once before: it makes the data and the model. `QUICKSTART` names their folder.

# %%
import os
from pathlib import Path

import pandas
from IPython.display import HTML, display

from megatron_grpo import GRPOConfig, GRPOTrainer

folder = Path(os.environ.get("QUICKSTART", "examples/quickstart")).resolve()
train_rows = pandas.read_json(folder / "data/train.jsonl", lines=True, dtype=str).to_dict("records")
test_rows = pandas.read_json(folder / "data/test.jsonl", lines=True, dtype=str).to_dict("records")[:100]
train_rows[:2]


# %% [markdown]
# ## Reward function
# The reward is a function of this cell. It has TRL's signature.


# %%
def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


# %% [markdown]
# ## A callback that draws while the ranks train


# %%
class Curve:
    def __init__(self):
        self.rewards, self.figure = [], display(HTML(""), display_id=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rewards.append(logs["reward"])
        step = 392 / max(1, len(self.rewards) - 1)
        points = " ".join(f"{4 + step * i:.0f},{76 - 72 * reward:.0f}" for i, reward in enumerate(self.rewards))
        line = f'<polyline points="{points}" fill="none" stroke="currentColor"/>'
        self.figure.update(HTML(f'<svg width="400" height="80">{line}</svg> step {state.global_step}, reward {logs["reward"]:.3f}'))


# %%
curve = Curve()
trainer = GRPOTrainer(
    folder / "model",
    correct,
    GRPOConfig(
        output_dir=os.environ.get("OUTPUT_DIR", "output/notebook"),
        overwrite_output_dir=True,
        torch_dtype="float32",
        num_generations=8,
        global_batch_size=256,
        max_tokens_per_micro_batch=4096,
        max_completion_length=6,
        learning_rate=5e-4,
        warmup_steps=5,
        max_steps=int(os.environ.get("STEPS", "25")),
    ),
    train_rows,
    test_rows,
    callbacks=[curve],
    nproc_per_node=2,
)
trainer.plan()

# %%
result = trainer.train()
display(result)

# %%
steps = pandas.DataFrame(result.history)
assert result.finished and len(curve.rewards) == len(steps)
steps[["step", "reward", "frac_reward_zero_std", "sampling/sampling_logp_difference/max", "time/step"]].tail()
