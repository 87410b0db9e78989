"""Prompts: reading data sets into rows, the seeded stream of prompts, and tokenization. No torch."""
