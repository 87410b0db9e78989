"""What a config.json says of how a model sees: its tower, and positions with three axes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.weights.families import Family
from megatron_grpo.weights.sizes import RopeShape, VisionShape

Config = Mapping[str, Any]
Require = Callable[[bool, str], None]  # remembers the sentence where the condition does not hold

_ROPES = ("rope_scaling", "rope_parameters")
_OF_AXES = ("mrope_section", "mrope_interleaved")


def without_axes(config: Config) -> Config:
    """The same configuration, its rope as that of a text model: `mrope` is the plain kind, with axes."""
    changed = {}
    for name in _ROPES:
        if isinstance(given := config.get(name), Mapping):
            plain = {key: value for key, value in given.items() if key not in _OF_AXES}
            changed[name] = {key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in plain.items()}
    return {**config, **changed}


def with_axes(rope: RopeShape, config: Config, family: Family, require: Require) -> RopeShape:
    """rope: as read from `without_axes`. config: config.json."""
    assert family.tower is not None
    require(rope.type == "default", f"rope type {rope.type!r} with axes (mrope_section) is not supported; only 'mrope' and 'default' are.")
    given = _said_once(config, "mrope_section", require) or family.tower.sections
    if not _are_sections(given):
        require(False, f"mrope_section must be three whole numbers, it is {given!r}.")
        return rope
    sections = tuple(given)
    require(
        sum(sections) == rope.dim // 2, f"mrope_section ({sections}) must have a sum of head_dim / 2 ({rope.dim // 2}): {sum(sections)}."
    )
    interleaved = family.tower.interleaved_axes
    given = _said_once(config, "mrope_interleaved", require)
    require(
        given in (None, interleaved), f"mrope_interleaved is {given}; in {config['architectures'][0]} it is {str(interleaved).lower()}."
    )
    return replace(rope, sections=sections, interleaved=interleaved)


def vision_of(config: Config, family: Family, require: Require, *, hidden: int) -> VisionShape | None:
    """The tower. hidden: channels of the text model. None with what is wrong in `require`."""
    assert family.tower is not None
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        require(False, f"vision_config must hold named values, it is {vision!r}.")
        return None
    try:
        shape = family.tower.shape(vision, config)
    except KeyError as missing:
        require(False, f"{config['architectures'][0]} needs {missing.args[0]} (in config.json or its vision_config).")
        return None
    numbers = {"depth": shape.depth, "channels": shape.width, "spatial_merge_size": shape.merge, "image_token_id": shape.image_token}
    for name, value in {**numbers, "patch_size": shape.patch[-1]}.items():
        require(
            isinstance(value, int) and not isinstance(value, bool) and value > 0,
            f"the tower's {name} must be a positive whole number, it is {value!r}.",
        )
    # Qwen2-VL calls its own channels embed_dim, and the text model's hidden_size.
    out = vision.get("out_hidden_size", vision.get("hidden_size") if "embed_dim" in vision else hidden)
    require(out == hidden, f"the tower gives tokens of {out} channels, and the text model takes {hidden}.")
    return shape


def _ropes(config: Config) -> Iterator[Config]:
    for level in (config, config.get("text_config") or {}):
        for name in _ROPES:
            if isinstance(given := level.get(name), Mapping):
                yield given


def _said_once(config: Config, key: str, require: Require) -> Any:
    """What config.json says under a key of any of its rope settings; None where it says nothing."""
    said = [given[key] for given in _ropes(config) if given.get(key) is not None]
    require(all(value == said[0] for value in said), f"{key} is said twice, and not alike: {' and '.join(map(repr, said))}.")
    return said[0] if said else None


def _are_sections(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 3
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)
    )
