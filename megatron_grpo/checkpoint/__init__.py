"""Checkpoints of a run: everything that decides what happens next, complete on disk or not there at all.

`resume` judges, without torch, which checkpoint a run continues: by `folder` (names, renames, checksums), `manifest` (what it is of),
`continuity` (what may change) and `content` (fingerprints). `saving` writes and restores: `distributed` has the Megatron part, `pieces`
says who writes what of it, `writing` brings files to the disk, `samples` has the rows that wait, `generators` the random states.
docs/checkpoints.md is the page for users.
"""
