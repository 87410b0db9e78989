"""Checkpoints of a run: the complete state that determines how training continues. A checkpoint is either complete on disk or absent.

`resume` decides, without torch, which checkpoint a run continues, using `manifest` (names, renames, checksums, contents of a manifest),
`resume_compatibility` (which settings may change) and `fingerprints` (settings and fingerprints). `saving` writes and restores
checkpoints: `distributed` has the Megatron-Core part, assigns its pieces to ranks and writes files to disk; `samples` has the pending
rows, `rng_state` the random states. docs/checkpoints.md is the page for users.
"""
