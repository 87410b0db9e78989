"""Faults, runs and results of tools/torture.py."""
