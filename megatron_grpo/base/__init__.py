"""Parts that any room may need: errors, files, clock, launcher, cleanup, and what this process is doing."""
