"""Commands for a first run: doctor, init, completion, dry-run, and the printing of settings."""
