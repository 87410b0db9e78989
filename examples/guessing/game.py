"""The environment of the guessing game, and its rewards."""

from megatron_grpo import Environment, StepOutput

HIGHEST = 15


class Game(Environment):
    """Answer each guess of a number from 1 to 15 with `higher` or `lower`."""

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
        hint = "higher" if guess < secret else "lower"
        return StepOutput(messages=[{"role": "user", "content": hint}], reward=is_possible)


def found(messages, secret, **columns):
    """Return 1.0 for each episode whose last message is the number, else 0.0."""
    last = [episode[-1] for episode in messages]
    return [
        float(message["role"] == "assistant" and message["content"] == str(number)) for message, number in zip(last, secret, strict=True)
    ]


def sensible(turn_rewards, **columns):
    """Return each episode's fraction of guesses that were still possible: the mean of the turn rewards."""
    return [sum(rewards) / max(len(rewards), 1) for rewards in turn_rewards]
