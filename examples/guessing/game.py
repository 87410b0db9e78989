"""The guessing game: who answers between the turns, and the rewards."""

from megatron_grpo import Environment, StepOutput

HIGHEST = 15


class Game(Environment):
    """A number from 1 to 15; says `higher` or `lower`."""

    def start(self, prompt):
        self.low, self.high = 1, HIGHEST
        return prompt

    def step(self, turn):
        secret = self.columns["secret"]
        try:
            guess = int(turn.text)
        except ValueError:
            return StepOutput(reward=0.0, done=True, metrics={"unreadable": 1})
        is_possible = float(self.low <= guess <= self.high)
        if guess == secret:
            return StepOutput(reward=is_possible, done=True, metrics={"found": 1})
        if guess < secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return StepOutput(messages=[{"role": "user", "content": "higher" if guess < secret else "lower"}], reward=is_possible)


def found(messages, secret, **columns):
    """1 where the last guess is the number."""
    return [
        float(said[-1]["role"] == "assistant" and said[-1]["content"] == str(number)) for said, number in zip(messages, secret, strict=True)
    ]


def sensible(turn_rewards, **columns):
    """The share of guesses that could still have been right: what the game gave, turn by turn."""
    return [sum(rewards) / max(len(rewards), 1) for rewards in turn_rewards]
