"""Reward functions: the protocol (TRL's signature), loading them by name, calling them safely, and the built-in ones.

Importing this package loads none of the built-ins' dependencies; each is imported when its reward is asked for by name.
"""
