"""Parallelism: the only modules that know how ranks are arranged: the grid (`layout`), its process groups (`state`), the collectives."""
