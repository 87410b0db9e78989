"""Common parts used by all packages: errors, files, timers, launcher, cleanup, and the activity of this process."""
