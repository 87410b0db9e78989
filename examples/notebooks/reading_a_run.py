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
# # Read a run with pandas
# A run writes its metrics, evaluations and completions as tables. `RUN` names its `output_dir`; without it, this notebook reads the run of
# `bash examples/quickstart/run.sh`.

# %%
import os
from pathlib import Path

import pandas

run = Path(os.environ.get("RUN", "output/quickstart"))
steps = pandas.read_json(run / "metrics.jsonl", lines=True).set_index("step")
steps[["reward", "frac_reward_zero_std", "grad_norm", "sampling/sampling_logp_difference/max"]].describe().T.map("{:.3g}".format)

# %% [markdown]
# ## Reward, and groups with equal rewards
# In a group with equal rewards all advantages are zero. `frac_reward_zero_std` is the fraction of such groups.

# %%
axes = steps.reward.rolling(8, min_periods=1).mean().plot(label="reward, mean of 8 steps", legend=True)
axes = steps.frac_reward_zero_std.plot(ax=axes, alpha=0.5, label="fraction of groups with equal rewards", legend=True)

# %% [markdown]
# ## Time by phase
# `time/step` is the sum of the phases of a step.

# %%
phases = steps.filter(regex="^time/(?!step$|.*_overlapped$)").sum()
assert abs(phases.sum() / steps["time/step"].sum() - 1) < 0.01
(phases / phases.sum()).sort_values(ascending=False).map("{:.1%}".format)

# %% [markdown]
# ## Held-out prompts
# Each evaluation is one line of `evaluations.jsonl`. `mean@n` is the mean score of `n` completions of each prompt.

# %%
evaluations = pandas.read_json(run / "evaluations.jsonl", lines=True)
latest = evaluations.iloc[-1]
mean = f"mean@{latest['n']}"
evaluations[evaluations.name == latest["name"]].set_index("step")[[mean, f"{mean}/stderr"]]

# %% [markdown]
# This table has the prompts whose answer was right before the run and is wrong after it.

# %%
score = f"rewards/{latest['score']}"
files = sorted((run / "evaluations" / latest["name"]).glob("step_*.parquet"))
before, after = (pandas.read_parquet(file).set_index(["dataset_row", "generation"]) for file in (files[0], files[-1]))
both = before[["prompt", "completion", score]].join(after[["completion", score]].add_suffix(" after"))
both[both[score] > both[f"{score} after"]]

# %%
better, worse = (both[score] < both[f"{score} after"]).sum(), (both[score] > both[f"{score} after"]).sum()
print(f"{better} better, {worse} worse, {len(both) - better - worse} equal")

# %% [markdown]
# ## Trainer and sampler
# The trainer and vLLM compute the log-prob of every sampled token with the same weights. In a correct run the largest difference is below
# 1e-3 nats in float32, and about 1e-1 in bfloat16.

# %%
difference = steps["sampling/sampling_logp_difference/max"]
axes = difference.plot(logy=True)
bound = float(os.environ.get("BOUND", 1e-3))
assert difference.max() < bound, f"the largest difference is {difference.max():.2g} nats: see docs/mismatch.md"
