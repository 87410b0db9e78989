"""Referee: recomputes a dumped step of this or another system in float64 and names the first number that differs."""
