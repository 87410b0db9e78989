"""Additions to a run: each is imported only by a run that uses it."""
