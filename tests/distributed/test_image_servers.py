"""A real rollout server with a vision-language model: image files are sent by key, and it samples from the trainer's inputs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tests.distributed.test_image_rollouts import MOST, folder, load, open_rows, worst  # noqa: F401 - a fixture
from tests.ranks import run_ranks
from tests.servers import ASKS, Server


def test_server_receives_image_files_once_and_samples_from_the_trainers_images(folder, tmp_path):  # noqa: F811
    server = Server(tmp_path / "server", folder / "model", "--vllm_max_model_len", "192", "--limit_images", "2")
    try:
        server.wait()
        [told] = run_ranks(body, 1, str(folder), str(server.address_file), str(tmp_path), env=ASKS)
    finally:
        server.close()
    for name in ("pushed", "forgotten", "tower moved"):
        assert max(told[name]) < MOST, (name, told[name])
    assert told["state"] == (2, 64 * 28**2)
    assert told["sent"] == [4, 0, 1], "each file once, and again where it was forgotten"
    assert "vLLM has" in told["another size"] and "max_pixels, min_pixels or the image processor differs" in told["another size"]
    assert told["damaged"].startswith("is not a BMP"), told["damaged"]


def body(rank, world_size, folder, address_file, out):  # noqa: F811
    from pathlib import Path

    import torch
    from safetensors.torch import load_file

    from megatron_grpo.core.base.errors import RunError
    from megatron_grpo.core.parallel.layout import Layout
    from megatron_grpo.core.parallel.state import start
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.settings import RolloutConfig
    from megatron_grpo.core.weights.buckets import WeightUpdate
    from megatron_grpo.core.weights.shape import ModelShape
    from megatron_grpo.plugins.servers import requests, wire
    from megatron_grpo.plugins.servers.http import start_coroutine
    from megatron_grpo.plugins.servers.servers import build_servers
    from megatron_grpo.run.config.settings import Config, RunConfig

    folder = Path(folder)
    start(Layout(world_size=1), seed=0)
    stream, image_spec = open_rows(folder)
    prompts, model = stream.take(4), load(folder)
    rollout = RolloutConfig(vllm_mode="server", vllm_server_host=[f"@{address_file}"], vllm_server_timeout=60.0, max_completion_length=64)
    inputs = SimpleNamespace(
        model_path=folder / "model", shape=ModelShape.from_pretrained(folder / "model"), image_spec=image_spec, longest_prompt=128,
        max_images=2,
    )  # fmt: skip
    engine = build_servers(
        Config(rollout=rollout, run=RunConfig(output_dir=out)), inputs, SimpleNamespace(device=torch.device("cpu")),
        bitwise_parity=lambda: None,
    )  # fmt: skip
    engine.score = lambda probes: next(iter(engine.scores(probes).values()))
    named = load_file(folder / "model" / "model.safetensors")

    def push(tensors, version, tower):
        engine.prepare()
        engine.load_weights(WeightUpdate(kind="weights", version=version, tensors=iter(tensors.items()), moves_tower=tower))

    sent = []
    but = requests.ImagesToSend.but

    def counted(self, known, keys):
        found = but(self, known, keys)
        if known != ():  # the probes' are sent with them
            sent[-1] += len(found)
        return found

    requests.ImagesToSend.but = counted
    told = {}
    try:
        push(named, 1, True)
        sent.append(0)
        told["pushed"] = worst(model, engine, prompts)
        # What the server has forgotten is asked for again.
        [member] = engine._broadcaster.server_group.used
        sent.append(0)
        worst(model, engine, prompts, seed=1)
        sent.append(0)
        member.image_keys.discard(prompts[0].images[0][1].key)
        told["forgotten"] = worst(model, engine, prompts, seed=2)
        told["sent"] = sent[:3]
        told["state"] = (member.state.limit_images, member.state.max_pixels)
        moved = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in named.items()}
        push(moved, 2, True)
        mine = model.state_dict()
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(moved[name.replace("model.language_model.", "model.").replace("model.visual", "visual")])
        told["tower moved"] = worst(model, engine, prompts, seed=3)
        engine._image_spec = open_rows(folder, max_pixels=784 * 16)[1]
        try:
            engine.generate(prompts[3:], SamplingSettings(n=1, max_completion_length=4), seed=4)
        except RunError as error:
            told["another size"] = str(error)
        images = wire.PlacedImage(key="bad", place=0, tokens=4)
        strange = wire.PlacedImage(key="who", place=0, tokens=4)
        bounds = wire.PixelBounds(min_pixels=784, max_pixels=50176)
        asked = wire.GenerateRequest(
            version=2, sampling=wire.Sampling(), image_data=(wire.ImageData(key="bad", data=b"hello"),), bounds=bounds,
            requests=(wire.Request(key="1", ids=(5,) * 6, seed=0, n=1, max_tokens=2, images=(images,)),
                      wire.Request(key="2", ids=(5,) * 6, seed=0, n=1, max_tokens=2, images=(strange,))),
        )  # fmt: skip
        lines = []
        start_coroutine(member.server.stream("/generate", asked, lines.append)).result(60)
        answers = [wire.decode_line(wire.GenerateLine, line) for line in lines]
        by_key = {answer.key: answer for answer in answers if answer is not None}
        told["damaged"] = by_key["1"].error
        assert by_key["2"].lacks == ("who",)
    finally:
        requests.ImagesToSend.but = but
        engine.close()
    assert np.isfinite(told["pushed"]).all()
    return told
