"""The parts of tools/torture.py: what is done to a run, how it is done, and what a rank of such a run is."""
