"""The built-in reward functions. `rewards.loading` imports one when it is requested by name."""
