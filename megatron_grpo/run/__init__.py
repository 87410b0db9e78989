"""The life of one process: signals, failure reports, and the filters of library messages."""
