"""Prompts: rows of a data set, the seeded stream that hands them out, and their tokens. No torch."""
