"""Who answers between turns. `protocol` says what an environment is, `transcript` keeps an episode's tokens, `play` keeps many in flight.

Nothing here knows who samples: `play` is given a `TurnSampler`.
"""
