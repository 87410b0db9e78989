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
# # Compare two reward functions
# This notebook compares reward functions without training, on completions that a run recorded. `RUN` names its `output_dir`; without it,
# this notebook reads the run of `bash examples/quickstart/run.sh`.

# %%
import os
from pathlib import Path

import pandas

from megatron_grpo import score

run = Path(os.environ.get("RUN", "output/quickstart"))
first = min((run / "completions").glob("step_*.parquet"))
rows = pandas.read_parquet(first)[["prompt_number", "prompt", "completion"]]
rows["answer"] = [str(sum(map(int, prompt.rstrip("=").split("+")))) for prompt in rows.prompt]
rows.head(8)

# %% [markdown]
# ## Two rewards: right answers only, and 0.5 for a right last digit


# %%
def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def last_digit(completions, answer, **columns):
    pairs = zip(completions, answer, strict=True)
    return [1.0 if text == right else 0.5 * (text[-1:] == right[-1]) for text, right in pairs]


# %% [markdown]
# `score` calls them as a run does: with its checks, its time limit and its handling of failures.

# %%
scores = pandas.DataFrame(score([correct, last_digit], rows.to_dict("records")))
groups = scores.groupby("prompt_number")[["correct", "last_digit"]]
groups.std().mean().rename("standard deviation within a group")

# %% [markdown]
# ## Groups with equal rewards
# In a group with equal rewards all advantages are zero. This is the fraction of such groups for each reward.

# %%
zero_std = (groups.std() == 0).mean()
zero_std.rename("frac_reward_zero_std")

# %% [markdown]
# ## Advantages
# This table has the mean advantage of right answers, of answers with the right last digit, and of wrong answers.

# %%
kinds = scores["last_digit"].map({1.0: "right", 0.5: "last digit right", 0.0: "wrong"})
advantages = (scores[["correct", "last_digit"]] - groups.transform("mean")) / (groups.transform("std") + 1e-4)
advantages.groupby(kinds).agg(["mean", "count"]).round(3)

# %%
assert zero_std["last_digit"] <= zero_std["correct"], "a finer reward must not have more groups with equal rewards"
