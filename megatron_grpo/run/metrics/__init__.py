"""Records of a run: metrics.jsonl, evaluations.jsonl, completions, plots, the live status line, and the services of `--report_to`.

docs/metrics.md is the page for users.
"""
