"""Reward functions: the protocol (TRL's signature), loading by name, scoring with error handling, and the built-in rewards.

Importing this package loads none of the dependencies of the built-in rewards; each is imported when its reward is requested by name.
"""
