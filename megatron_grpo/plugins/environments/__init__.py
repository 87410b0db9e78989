"""Multi-turn environments.

`protocol` defines the interface of an environment, `trajectory` keeps the tokens of an episode, and `episode_runner` plays many episodes
concurrently. The package is independent of the sampler: `episode_runner` receives a `TurnSampler`.
"""
