"""Completions that continue over weight updates."""
