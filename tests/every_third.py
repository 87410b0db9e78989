"""A pytest plugin (`-p tests.every_third`): of what was collected, every third test, so that slow files are sampled evenly."""


def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % 3])
    items[:] = items[::3]
