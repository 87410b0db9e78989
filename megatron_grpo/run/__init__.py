"""The life of one process: signals, failure reports, what libraries may say."""
