"""Estimates of an evaluation, with what they may be off by: mean@n, pass@k, and the change between two evaluations. Pure numpy.

scores: float64 [P, n], the n completions of each of P prompts; NaN where a completion has no score, which is then left out.
docs/evaluation.md says what each is for. pass@k: Chen et al., arXiv:2107.03374, section 2.1.
"""

from __future__ import annotations

import math

import numpy as np


def prompt_means(scores: np.ndarray) -> np.ndarray:
    """float64 [P]: of the scores that a prompt has; NaN where it has none."""
    count = (~np.isnan(scores)).sum(axis=1)
    return np.where(count > 0, np.nansum(scores, axis=1) / np.maximum(count, 1), np.nan)


def over_prompts(values: np.ndarray) -> tuple[float, float]:
    """(mean, standard error) where the prompts are a sample of all that could be asked: one value a prompt, however many completions.

    Completions of one prompt are not independent, so their number does not enter. NaNs are left out; the error of one value is NaN.
    """
    found = values[~np.isnan(values)]
    if not len(found):
        return math.nan, math.nan
    return float(found.mean()), float(found.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan


def of_sampling(scores: np.ndarray) -> float:
    """Standard error of the mean of `prompt_means` for these very prompts: what another seed alone would change.

    A prompt with one score tells nothing of its own variance, and is given the mean of the others'; NaN where all are so.
    """
    count = (~np.isnan(scores)).sum(axis=1)
    scores, count = scores[count > 0], count[count > 0]
    several = count > 1
    if not several.any():
        return math.nan
    squares = np.nansum((scores - prompt_means(scores)[:, None]) ** 2, axis=1)
    variance = squares / np.maximum(count - 1, 1)
    variance = np.where(several, variance, variance[several].mean())
    return float(math.sqrt((variance / count).sum()) / len(scores))


def pass_at_k(num_right: np.ndarray, num_sampled: np.ndarray, k: int) -> np.ndarray:
    """float64 [P]: the chance that one of k completions is right, unbiased: 1 - C(n - c, k) / C(n, k). NaN where k are not there.

    It is the share of a prompt's k-subsets that hold a right one. num_right: c, int [P]. num_sampled: n, int [P].
    """
    right, sampled = np.asarray(num_right)[:, None], np.asarray(num_sampled)[:, None]
    place = np.arange(k)[None, :]
    ratios = np.clip(sampled - right - place, 0, None) / np.maximum(sampled - place, 1)
    return np.where(sampled[:, 0] >= k, 1.0 - ratios.prod(axis=1), np.nan)


def change(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """(mean, standard error) of after - before, float64 [P] of the same prompts. Paired: how hard a prompt is cancels."""
    return over_prompts(after - before)
