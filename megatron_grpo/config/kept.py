"""What sampling from less than the whole vocabulary (top_k, top_p, min_p, a grammar) asks of the other settings. No torch.

The trainer's softmax runs over the words that were left, so that its log-probs are those of the distribution drawn from. Their ids travel
with every token, from the sampler to where the row trains.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.config import Config, RolloutConfig
from megatron_grpo.config.grammar import flag_of, of_training
from megatron_grpo.config.tuner import Pair

# The largest top_k: its words are a kilobyte a token, at each place where a row waits or travels. Other cuts alone come with it.
MOST = 256
USUAL = 64  # what is said in place of a top_k of 1


def is_cut(rollout: RolloutConfig) -> bool:
    """Whether training draws from less than the whole vocabulary."""
    return rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0 or of_training(rollout) is not None


def words_at_most(rollout: RolloutConfig) -> int:
    """The top_k that training draws with; 0 draws from all words."""
    return rollout.top_k or (MOST if is_cut(rollout) else 0)


def warnings(rollout: RolloutConfig) -> Iterator[str]:
    if is_cut(rollout) and not rollout.top_k:
        yield (
            f"Note: {in_words(rollout)} without top_k draws among the {MOST} likeliest words (top_k {MOST}): the ids of the words that are "
            "left travel with every token, for the trainer's softmax runs over them. Less likely words are never drawn in training."
        )


def in_words(rollout: RolloutConfig) -> str:
    """`top_k 5 and top_p 0.9`"""
    cuts = {"top_k": (rollout.top_k, 0), "top_p": (rollout.top_p, 1), "min_p": (rollout.min_p, 0)}
    said = [f"{name} {value:g}" for name, (value, off) in cuts.items() if value != off]
    return " and ".join([*said, *(["structured outputs"] if of_training(rollout) is not None else [])])


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    rollout = cfg.rollout
    if not is_cut(rollout):
        return
    if rollout.top_k > MOST:
        yield (
            ("top_k",),
            f"top_k ({rollout.top_k}) is more than {MOST}: the ids of the words that it leaves travel with every token, for the trainer's "
            f"softmax runs over them. Use {MOST}, or 0, which draws from all words.",
            {"top_k": [MOST, 0]},
        )
    others = {"top_k": f"{USUAL}, or 0, which draws from all words", "min_p": "less"}
    for flag, other in others.items():
        if getattr(rollout, flag) == 1:
            yield (
                (flag,),
                f"{flag} (1) leaves the likeliest word alone, whose log-prob is then 0 whatever the weights are: nothing would train. Use "
                f"{other}.",
                {"top_k": [USUAL, 0]} if flag == "top_k" else {"min_p": [0.0]},
            )
    if rollout.rollout_func is not None:
        yield (
            (
                "top_k" if rollout.top_k else "top_p" if rollout.top_p < 1 else "min_p" if rollout.min_p else flag_of(rollout),
                "rollout_func",
            ),
            f"{in_words(rollout)} does not go with rollout_func: nobody knows which request drew which of the tokens that it returns, so "
            f"not which words were left for each. Leave {'them' if of_training(rollout) is not None else 'top_k, top_p and min_p'} out.",
            {},
        )
