"""Looks at a run after it: what differed, what a step would do again, what another loss would have done."""
