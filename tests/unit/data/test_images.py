"""Images of every kind: decoded upright to RGB for trainer and sampler, sized by header, or rejected with a reason."""

from __future__ import annotations

import hashlib
import io
import json
import pickle

import numpy as np
import pytest

from megatron_grpo.core import images as image_processing
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.images import (
    ImageError,
    ImageProcessorSpec,
    ImageSource,
    as_png,
    collapse_image_tokens,
    decode_image,
    make_image_source,
    num_tokens,
    resized_size,
)
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data.chat import with_parts
from megatron_grpo.run.data.checks import check_for_episodes, check_images, num_places
from megatron_grpo.run.data.files import ConcatRows, images_of_row
from megatron_grpo.run.data.image_dataset import ImageStore, PatchCache, expand_image_tokens, places
from megatron_grpo.run.data.prompts import load_rows, open_stream
from megatron_grpo.run.inputs import ValidatedInputs, rows_for_model_and_rewards
from megatron_grpo.run.models import bound_notes, read_image_spec
from tests.seeing import as_bytes, picture

EYES = ImageProcessorSpec(image_token=9, around=(7, 8), min_pixels=3136, max_pixels=50176, settings={
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "merge_size": 2, "patch_size": 14,
    "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "resample": 3, "rescale_factor": 1 / 255, "temporal_patch_size": 2,
})  # fmt: skip


def make_exif(orientation):
    from PIL import Image

    found = Image.Exif()
    found[0x0112] = orientation
    return found


def decode_upright(data):
    """What Pillow's own function makes of it."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_image_applies_exif_orientation_and_header_gives_size(form, orientation):
    data = as_bytes(picture(40, 90), form, exif=make_exif(orientation))
    image = decode_image(data)
    assert (image.height, image.width) == ImageSource("x", held=data).size() == ((90, 40) if orientation > 4 else (40, 90))
    assert np.array_equal(np.asarray(image), np.asarray(decode_upright(data)))


@pytest.mark.parametrize(("mode", "form"), [("L", "PNG"), ("P", "PNG"), ("P", "GIF"), ("LA", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"),
                                            ("L", "JPEG"), ("RGB", "BMP"), ("RGB", "PPM")])  # fmt: skip
def test_decode_image_converts_every_mode_to_rgb(mode, form):
    image = decode_image(as_bytes(picture(33, 47, mode=mode), form))
    assert image.mode == "RGB" and image.size == (47, 33)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(picture(33, 47, mode=mode).convert("RGB")).astype(int)).mean() < 3


def test_decode_image_removes_metadata_so_vllm_does_not_rotate_again():
    from PIL import Image, ImageOps
    from vllm.multimodal.parse import MultiModalDataParser

    for form in ("JPEG", "PNG", "WEBP"):
        data = as_bytes(picture(40, 90), form, exif=make_exif(6))
        image = decode_image(data)
        assert image.info == {} and not image.getexif() and ImageOps.exif_transpose(image).size == image.size
        [read] = MultiModalDataParser().parse_mm_data({"image": [image]})["image"].get_all()
        assert np.array_equal(np.asarray(read), np.asarray(image)), "vLLM computes with the trainer's pixels"
        assert np.array_equal(np.asarray(decode_image(as_png(Image.open(io.BytesIO(data))))), np.asarray(image))


def test_decode_image_makes_transparency_white_and_scales_sixteen_bits():
    from PIL import Image

    clear = Image.new("RGBA", (30, 30), (0, 0, 0, 0))
    assert set(np.asarray(decode_image(as_bytes(clear))).ravel()) == {255}
    in_palette = clear.convert("P")
    assert set(np.asarray(decode_image(as_bytes(in_palette, transparency=in_palette.getpixel((0, 0))))).ravel()) == {255}
    gray = Image.fromarray(np.full((30, 30), 32768, dtype=np.uint16))
    assert set(np.asarray(decode_image(as_bytes(gray))).ravel()) == {128}
    with pytest.raises(ImageError, match="floating-point"):
        decode_image(as_bytes(Image.fromarray(np.ones((30, 30), np.float32)), "TIFF"))


def test_image_token_count_equals_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for _ in range(500):
        height, width = (int(side) for side in rng.integers(1, 3000, 2))
        bounds = dict(factor=28, min_pixels=int(rng.integers(784, 50000)), max_pixels=int(rng.integers(50000, 2_000_000)))
        if max(height, width) <= 200 * min(height, width):
            assert resized_size(height, width, **bounds) == smart_resize(height, width, **bounds)
    with pytest.raises(ImageError, match="more than 200 times"):
        resized_size(2, 401, factor=28, min_pixels=1, max_pixels=10**6)


@pytest.mark.parametrize("size", [(56, 56), (30, 200), (333, 200), (28, 28), (1, 150), (700, 700)])
def test_image_patch_count_from_header_equals_patches(size):
    data = as_bytes(picture(*size))
    grid = EYES.grid(*ImageSource("x", held=data).size())
    patches = EYES.patches(decode_image(data))
    assert patches.shape == (np.prod(grid), EYES.channels) and patches.dtype == np.float32
    assert EYES.tokens(grid) * 4 == len(patches)


def write_rows(folder, *rows, name="d.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(dataset=str(folder / name))


def make_image_row(*images, text="<image>" * 1):
    return {"messages": [{"role": "user", "content": text + "?"}], "images": list(images)}


def list_problems(cfg, **more):
    with pytest.raises(ConfigError) as caught:
        check_images(load_rows(cfg, image_spec=EYES, **more))
    [problem] = caught.value.problems
    return problem.message


def damage_image(image):
    data = as_bytes(image, "JPEG")
    return data[: len(data) // 2]


BAD = {
    "gone": (lambda at: "gone.png", "does not exist"),
    "a folder": (lambda at: ".", "is not a file"),
    "out of the root": (lambda at: "../d.png", r"outside of data_root"),
    "an absolute path out of it": (lambda at: "/etc/hostname", r"outside of data_root"),
    "a link out of it": (lambda at: (at / "l.png").symlink_to("/etc/hostname") or "l.png", "outside of data_root"),
    "a URL": (lambda at: "https://example.org/a.png", "is the URL .* URLs are not downloaded"),
    "a URL of a file": (lambda at: f"file://{at}/good.png", "is the URL .* URLs are not downloaded"),
    "text": (lambda at: (at / "t.png").write_text("hello") and "t.png", "is not a BMP, GIF, JPEG"),
    "cut short": (lambda at: (at / "c.jpg").write_bytes(damage_image(picture(200, 300))) and "c.jpg", "cannot be read: .*truncated"),
    "a strip": (lambda at: (at / "s.png").write_bytes(as_bytes(picture(2, 500))) and "s.png", "one side is more than 200 times"),
    "empty": (lambda at: (at / "e.png").write_bytes(b"") or "e.png", "is not a BMP|cannot be read"),
    "a number": (lambda at: 7, "is of type int"),
}


@pytest.mark.parametrize("name", BAD)
def test_image_that_cannot_be_used_is_rejected_with_row(tmp_path, name):
    make, said = BAD[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "good.png").write_bytes(as_bytes(picture(40, 40)))
    cfg = write_rows(tmp_path / "data", make_image_row("good.png"), make_image_row(make(tmp_path / "data")))
    message = list_problems(cfg)
    assert message.startswith("d.jsonl line 2: image ")
    assert __import__("re").search(said, message), message


def test_image_with_too_many_pixels_is_rejected_by_header(tmp_path):
    """41,000 x 41,000 pixels in some 200 kB: no pixel of it is made."""
    from PIL import Image

    data = as_bytes(Image.new("1", (41_000, 41_000)))
    assert len(data) < 1 << 20
    (tmp_path / "b.png").write_bytes(data)
    assert "cannot be read" in (said := list_problems(write_rows(tmp_path, make_image_row("b.png")))) or "bomb" in said
    (tmp_path / "b.png").write_bytes(as_bytes(Image.new("1", (10_000, 10_000))))
    assert "has 10,000 x 10,000 pixels, more than the maximum of 89,478,485" in list_problems(write_rows(tmp_path, make_image_row("b.png")))


def test_image_placeholders_must_match_images_of_the_row(tmp_path):
    (tmp_path / "a.png").write_bytes(as_bytes(picture(40, 40)))
    for row, said in (
        (make_image_row("a.png", "a.png"), r"have 2 image\(s\) in `images` and 1 placeholder"),
        (make_image_row(text="<image>"), r"have 0 image\(s\) in `images` and 1 placeholder"),
        (make_image_row("a.png", text="none"), r"have 1 image\(s\) in `images` and 0 placeholder"),
        (
            make_image_row("a.png") | {"videos": ["v.mp4"]},
            "values in `videos`, which would not be passed to the model: training uses text and images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "images": ["a.png"]},
            "with a part of type image that contains the image",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "part of type video"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_rows(write_rows(tmp_path, row), image_spec=EYES)
    with pytest.raises(ConfigError, match=r"more than limit_images \(1\)"):
        load_rows(
            DataConfig(dataset=write_rows(tmp_path, make_image_row("a.png", "a.png", text="<image>" * 2)).dataset, limit_images=1),
            image_spec=EYES,
        )
    with pytest.raises(
        ConfigError, match="truncation_strategy left cannot truncate prompts with images, and 1 of 2 rows have images. Use delete"
    ):
        load_rows(
            DataConfig(dataset=write_rows(tmp_path, make_image_row("a.png"), {"prompt": "b"}).dataset, truncation_strategy="left"),
            image_spec=EYES,
        )
    with pytest.raises(ConfigError, match="which would not be passed to the model: training uses text only"):
        load_rows(write_rows(tmp_path, make_image_row("a.png")))


def test_images_with_episodes_or_rollout_func_are_rejected_at_load(tmp_path):
    """Episodes, and rollout functions: else the first prompt with a picture ends the run, or a later turn does not see it."""
    (tmp_path / "a.png").write_bytes(as_bytes(picture(40, 40)))
    seen = load_rows(write_rows(tmp_path, make_image_row("a.png"), {"prompt": "b"}), image_spec=EYES)
    with pytest.raises(ConfigError, match="1 of 2 rows have images, but multi-turn episodes support text only"):
        check_for_episodes(seen, "dataset")
    own = resolve(["--rollout_func", "mine.py:f"])
    problems = rows_for_model_and_rewards(own, ValidatedInputs(sets=[("dataset", seen)]))
    assert ["1 of 2 rows have images, but rollout_func does not support them" in one.message for one in problems] == [True]
    blind = load_rows(write_rows(tmp_path, {"prompt": "b"}), image_spec=EYES)
    assert not rows_for_model_and_rewards(own, ValidatedInputs(sets=[("dataset", blind)]))
    assert not rows_for_model_and_rewards(resolve([]), ValidatedInputs(sets=[("dataset", seen)]))


def test_image_parts_and_image_tags_are_both_placeholders():
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "a<image>b", "image": None}]
    assert num_places([{"role": "user", "content": parts}]) == 2 == num_places("x<image><image>")
    assert with_parts(parts) == [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert with_parts("a<image>") == [{"type": "text", "text": "a"}, {"type": "image"}] and with_parts("a") == "a"


def test_image_column_forms_give_equal_images(tmp_path):
    image = picture(60, 90)
    data = as_bytes(image)
    (tmp_path / "a.png").write_bytes(data)
    forms = ["a.png", str(tmp_path / "a.png"), data, {"bytes": data, "path": None}, {"bytes": None, "path": "a.png"}, image]
    rows = [{"prompt": "<image>", "images": [form]} for form in forms] + [{"prompt": "<image>", "image": "a.png"}]
    image_store = ImageStore(ConcatRows([(rows, "d row {}".format)]), EYES, root=tmp_path)
    shown = [image_store.images(number)[0] for number in range(len(rows))]
    assert image_store.faults(range(len(rows))) == []
    assert all(np.array_equal(one.patches(), EYES.patches(image)) for one in shown)
    assert len({one.key for one in shown[:5]}) == 1
    assert images_of_row({"images": None}) == images_of_row({}) == images_of_row({"images": []}) == []


def test_image_key_depends_on_bytes_and_settings_not_path(tmp_path):
    """Mutations: the path alone; without max_pixels."""
    from dataclasses import replace

    for folder, seed in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(as_bytes(picture(60, 60, seed=seed)))
    rows = ConcatRows([([{"images": ["x.png"]}], "d row {}".format)])
    one, other = (ImageStore(rows, EYES, root=tmp_path / folder).images(0)[0] for folder in ("a", "b"))
    smaller = ImageStore(rows, replace(EYES, max_pixels=3136), root=tmp_path / "a").images(0)[0]
    assert len({one.key, other.key, smaller.key}) == 3
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.png").write_bytes((tmp_path / "a" / "x.png").read_bytes())
    assert ImageStore(rows, EYES, root=tmp_path / "c").images(0)[0].key == one.key
    assert not np.array_equal(one.patches(), other.patches())


def test_image_file_changed_during_run_raises_with_row_and_file(tmp_path):
    (tmp_path / "x.png").write_bytes(as_bytes(picture(60, 60)))
    found = ImageStore(ConcatRows([([{"images": ["x.png"]}], "d row {}".format)]), EYES, root=tmp_path).images(0)[0]
    assert found.key
    (tmp_path / "x.png").write_bytes(as_bytes(picture(60, 60, seed=5)))
    with pytest.raises(ConfigError, match="d row 0: image x.png has changed since this run first read it"):
        found.patches()
    (tmp_path / "x.png").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        found.data()


def test_image_is_sent_to_ranks_by_name_and_loaded_there():
    data = as_bytes(picture(60, 60))
    image_store = ImageStore(ConcatRows([([{"images": [data]}], "d row {}".format)]), EYES, root=".")
    found = image_store.images(0)[0]
    sent = pickle.dumps(found)
    assert len(sent) < 200 < len(data)
    assert pickle.loads(sent) is found


def test_patch_cache_evicts_above_its_byte_limit():
    cache = PatchCache(most_bytes=3000)
    for number in range(5):
        cache.put(str(number), np.zeros(250, np.float32))
        cache.get("0")
    assert [cache.get(str(number)) is not None for number in range(5)] == [True, False, False, True, True]
    cache.put("huge", np.zeros(1000, np.float32))
    assert cache.get("huge") is None


def test_image_token_ids_expand_and_collapse_consistently():
    class Seen:
        grid, merge = (1, 4, 6), 2

    pictures_ = (Seen(), Seen())
    short = [1, 7, 9, 8, 2, 7, 9, 8, 3]
    long = expand_image_tokens(short, pictures_, 9)
    assert long == [1, 7, *[9] * 6, 8, 2, 7, *[9] * 6, 8, 3]
    assert [place for place, _ in places(long, pictures_, 9)] == [2, 11]
    spans = [(place, num_tokens(one)) for place, one in places(long, pictures_, 9)]
    assert collapse_image_tokens([*long, 9, 9], spans) == [*short, 9, 9]  # drawn placeholders are words
    with pytest.raises(ValueError, match="3 image tokens, but the row has 2"):
        expand_image_tokens([*short, 9], pictures_, 9)


def test_max_pixels_setting_overrides_environment_variable_with_note(tmp_path, monkeypatch):
    config = {"vision_config": {"patch_size": 14}, "image_token_id": 9, "vision_start_token_id": 7, "vision_end_token_id": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 3136, "longest_edge": 12845056}}))
    monkeypatch.setenv("MAX_PIXELS", "50176")
    by_environment, by_flag = DataConfig(), DataConfig(max_pixels=100352)
    assert read_image_spec(by_environment, tmp_path).max_pixels == 50176 and read_image_spec(by_flag, tmp_path).max_pixels == 100352
    assert bound_notes(by_environment) == ["max_pixels is not set; the environment variable MAX_PIXELS (50176) applies."]
    assert bound_notes(by_flag) == ["max_pixels (100352) overrides the environment variable MAX_PIXELS (50176)."]
    monkeypatch.setenv("MAX_PIXELS", "many")
    with pytest.raises(ConfigError, match=r"variable MAX_PIXELS \('many'\) is not a positive number"):
        read_image_spec(by_environment, tmp_path)
    monkeypatch.delenv("MAX_PIXELS")
    assert read_image_spec(by_environment, tmp_path).max_pixels == 12845056 and bound_notes(by_flag) == []
    with pytest.raises(ConfigError, match=r"max_pixels \(500\) is less than the pixels of one image token: 28 x 28 = 784. Use 784"):
        read_image_spec(DataConfig(max_pixels=500), tmp_path)
    # Qwen2.5-VL's own file on the Hub has its bounds outside of `size`.
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 784, "max_pixels": 1003520, "patch_size": 14}))
    assert read_image_spec(by_environment, tmp_path).processor_size == {"shortest_edge": 784, "longest_edge": 1003520}
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config.json is missing from the model directory"):
        read_image_spec(by_environment, tmp_path)


class SmallTokenizer:
    """A tokenizer that knows a few tokens."""

    chat_template, all_special_ids, name_or_path = "yes", (), ""

    def apply_chat_template(self, messages, **options):
        ids = []
        for message in messages:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                ids += [7, 9, 8] if part["type"] == "image" else [20 + len(part["text"])]
        return {"input_ids": ids}


def test_image_tokens_count_toward_max_prompt_length(tmp_path):
    for name, size in (("a", (56, 56)), ("b", (112, 112)), ("c", (56, 84))):
        (tmp_path / f"{name}.png").write_bytes(as_bytes(picture(*size)))
    cfg = write_rows(
        tmp_path,
        make_image_row("a.png"),
        make_image_row("b.png", "c.png", text="<image>x<image>"),
        {"prompt": [{"role": "user", "content": "no"}]},
    )
    stream = open_stream(cfg, SmallTokenizer(), seed=3, image_spec=EYES)
    prompts = {prompt.row: prompt for prompt in stream.take(3)}
    assert {row: len(prompt.token_ids) for row, prompt in prompts.items()} == {0: 7, 1: 28, 2: 1}
    assert [(place, one.num_tokens) for place, one in prompts[1].images] == [(1, 16), (20, 6)]
    assert stream.longest_prompt == 28 and stream.rows.max_images == 2 and prompts[2].images == ()
    again = open_stream(cfg, SmallTokenizer(), seed=3, image_spec=EYES)
    for number in (5, 0, 4):
        one, other = again.list_images(number), stream.list_images(number)
        assert [(place, shown.key) for place, shown in one] == [(place, shown.key) for place, shown in other]
    assert again.taken == 0
    limited = DataConfig(dataset=cfg.dataset, max_prompt_length=27)
    with pytest.raises(ConfigError, match="longer than max_prompt_length .27. tokens; the longest has 28"):
        open_stream(limited, SmallTokenizer(), seed=3, image_spec=EYES)
    deleted = DataConfig(dataset=cfg.dataset, max_prompt_length=27, truncation_strategy="delete")
    assert len(open_stream(deleted, SmallTokenizer(), seed=3, image_spec=EYES)) == 2


def test_dataset_fingerprint_changes_with_image_file_content(tmp_path):
    (tmp_path / "a.png").write_bytes(as_bytes(picture(56, 56)))
    cfg = write_rows(tmp_path, make_image_row("a.png"))
    rows = load_rows(cfg, image_spec=EYES)
    first, stamp = rows.fingerprint(), rows.image_store.stamp()
    assert load_rows(cfg, image_spec=EYES).fingerprint() == first
    (tmp_path / "a.png").write_bytes(as_bytes(picture(60, 80)))
    changed = load_rows(cfg, image_spec=EYES)
    assert changed.fingerprint() != first and changed.image_store.stamp() != stamp


def test_formats_whose_decoders_start_programs_are_not_opened(tmp_path):
    data = as_bytes(picture(30, 30), "EPS")
    assert hashlib.sha256(data).digest() and "EPS" not in image_processing.FORMATS
    with pytest.raises(ImageError, match="is not a BMP"):
        decode_image(data)


def test_image_path_that_is_a_device_is_rejected(tmp_path):
    found = (
        make_image_source("zero", tmp_path)
        if (tmp_path / "zero").symlink_to("/dev/zero")
        else ImageSource("zero", path=__import__("pathlib").Path("/dev/zero"))
    )
    with pytest.raises(ImageError, match="is not a file"):
        found.size()
    with pytest.raises(ImageError, match="is not a file"):
        found.read()
