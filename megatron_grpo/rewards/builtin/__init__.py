"""The reward functions that come with the package. `rewards.loading` imports one when it is asked for by name."""
