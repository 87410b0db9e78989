"""Checkpoints of a run: everything that decides what happens next, complete on disk or not there at all.

`resume` judges, without torch, which checkpoint a run continues: by `manifest` (names, renames, checksums, and what it is of),
`continuity` (what may change) and `content` (settings and fingerprints). `saving` writes and restores: `distributed` has the Megatron part
and brings files to the disk, `pieces` says who writes what of it, `samples` has the rows that wait, `generators` the random states.
docs/checkpoints.md is the page for users.
"""
