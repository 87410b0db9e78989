"""A pytest plugin (`-p tests.every_sixth`) that selects every sixth test of each file."""

from collections import Counter


def pytest_collection_modifyitems(config, items):
    seen = Counter()
    kept, left = [], []
    for item in items:
        (left if seen[item.path] % 6 else kept).append(item)
        seen[item.path] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept
