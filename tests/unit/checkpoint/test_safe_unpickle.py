"""Checkpoints that try to execute code when they are read. Each attack is first shown to work on torch's own reader."""

from __future__ import annotations

import io
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex

from megatron_grpo.run.checkpoint.safe_unpickle import UnsafePickleError, refuse_extra_state, without_code_execution


class DirectoryCreatingPickle:
    """A pickle that creates a directory when loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        import os

        return os.mkdir, (self.path,)


@pytest.fixture
def checkpoint(tmp_path):
    """A real one, of one tensor and one object."""
    folder = tmp_path / "checkpoint"
    dcp.save({"weight": torch.arange(6.0), "object": ["data", 1]}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"})
    )
    torch.save({"optimizer_step": 4}, folder / "common.pt")
    return folder


def read(folder):
    """As Megatron-Core reads: the description, the tensors and objects in it, and the common file."""
    state = {"weight": torch.zeros(6), "object": None}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state, torch.load(folder / "common.pt", weights_only=False)


def change_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def write_evil_metadata(folder, proof):
    def change(metadata):
        metadata.planner_data = DirectoryCreatingPickle(proof)

    change_metadata(folder, change)


def write_evil_tensor(folder, proof):
    """What was a tensor, which is read as data, becomes an object, which is not."""
    stream = io.BytesIO()
    torch.save(DirectoryCreatingPickle(proof), stream)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())

    def change(metadata):
        metadata.state_dict_metadata = {name: BytesStorageMetadata() for name in metadata.state_dict_metadata}
        for index, part in list(metadata.storage_data.items()):
            part.offset, part.length = 0, len(stream.getvalue())
            metadata.storage_data[MetadataIndex(index.fqn)] = part

    change_metadata(folder, change)


def write_evil_common(folder, proof):
    torch.save(DirectoryCreatingPickle(proof), folder / "common.pt")


@pytest.mark.parametrize("attack", [write_evil_metadata, write_evil_tensor, write_evil_common])
def test_safe_unpickle_executes_no_code(checkpoint, tmp_path, attack):
    proof = tmp_path / "it ran"
    attack(checkpoint, proof)
    with pytest.raises((UnsafePickleError, dcp.api.CheckpointException)) as caught, without_code_execution(checkpoint):
        read(checkpoint)
    told = str(caught.value) + "".join(str(error) for error, _ in getattr(caught.value, "failures", {}).values())
    assert not proof.exists() and "mkdir" in told
    try:
        read(checkpoint)
    except (dcp.api.CheckpointException, AttributeError, TypeError):
        pass  # what it read was no tensor
    assert proof.exists()  # the attack is one


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch.distributed.checkpoint.metadata", "os.system"), ("torch", "load"), ("torch", "hub.load"), ("builtins", "eval"),
     ("torch.serialization", "load"), ("pathlib", "os.system"), ("collections", "namedtuple"),
     ("torch.distributed.checkpoint.filesystem", "os.system"), ("importlib", "import_module")],
)  # fmt: skip
def test_safe_unpickle_rejects_globals_with_side_effects(checkpoint, module, name):
    def text(word):
        return b"\x8c" + bytes([len(word)]) + word.encode()

    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + text(module) + text(name) + b"\x93.")
    with pytest.raises(UnsafePickleError, match=f"names {module}.{name}"), without_code_execution(checkpoint):
        dcp.FileSystemReader(checkpoint).read_metadata()


class GetattrPickle:
    """Pickled as `getattr(of, name)`, as Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles an enum member."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


@pytest.mark.parametrize(("of", "name"), [(MetadataIndex, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), ("text", "format")])
def test_safe_unpickle_allows_getattr_for_enum_members_only(checkpoint, of, name):
    def change(metadata):
        metadata.planner_data = GetattrPickle(of, name)

    change_metadata(checkpoint, change)
    with pytest.raises(UnsafePickleError, match=f"asks for '{name}'"), without_code_execution(checkpoint):
        dcp.FileSystemReader(checkpoint).read_metadata()


def test_safe_unpickle_reads_enum_members_of_every_pickle_form(checkpoint):
    def change(metadata):
        metadata.planner_data = GetattrPickle(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")

    change_metadata(checkpoint, change)
    with without_code_execution(checkpoint):
        found = dcp.FileSystemReader(checkpoint).read_metadata()
    assert found.planner_data is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize("path", ["../../elsewhere", "..", ".", "", "/etc/passwd", "../checkpoint/__0_0.distcp", ["__0_0.distcp"]])
def test_safe_unpickle_rejects_metadata_with_paths_outside_checkpoint(checkpoint, path):
    def change(metadata):
        for part in metadata.storage_data.values():
            part.relative_path = path

    change_metadata(checkpoint, change)
    with pytest.raises(UnsafePickleError, match="refers to a file outside the checkpoint"), without_code_execution(checkpoint):
        dcp.FileSystemReader(checkpoint).read_metadata()


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_safe_unpickle_rejects_links_to_outside_files(checkpoint, tmp_path, name):
    (checkpoint / name).rename(tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePickleError, match=f"{name} is a link to outside the checkpoint"), without_code_execution(checkpoint):
        read(checkpoint)


class StateSettingPickle:
    """Pickled as a class whose attributes are set, in the way in which pickle sets those of an object."""

    def __init__(self, kind, **attributes):
        self.kind, self.attributes = kind, attributes

    def save(self, pickler):
        for part in (self.kind, (None, self.attributes)):
            pickler.save(part)
        pickler.write(pickle.BUILD)


class Writer(pickle._Pickler):
    dispatch = {**pickle._Pickler.dispatch, StateSettingPickle: lambda self, builds: builds.save(self)}


@pytest.mark.parametrize(
    "builds",
    [StateSettingPickle(MetadataIndex, __eq__=torch.Size), StateSettingPickle(torch.Size, fields=1),
     StateSettingPickle(MetadataIndex("a"), __class__=BytesStorageMetadata), StateSettingPickle(MetadataIndex("a"), unknown=1)],
)  # fmt: skip
def test_safe_unpickle_rejects_state_of_other_classes(checkpoint, builds):
    metadata, stream = pickle.loads((checkpoint / ".metadata").read_bytes()), io.BytesIO()
    metadata.planner_data = builds
    Writer(stream, 4).dump(metadata)
    (checkpoint / ".metadata").write_bytes(stream.getvalue())
    equals = MetadataIndex.__eq__
    with pytest.raises(UnsafePickleError, match="sets the state of an unexpected object"), without_code_execution(checkpoint):
        dcp.FileSystemReader(checkpoint).read_metadata()
    assert MetadataIndex.__eq__ is equals


@pytest.mark.parametrize("said", [{"sharded_backend": "zarr"}, {"sharded_backend": "torch_dist", "common_backend": "pickle"}, {}])
def test_safe_unpickle_rejects_checkpoint_that_names_another_loader(checkpoint, said):
    (checkpoint / "metadata.json").write_text(json.dumps(said))
    with pytest.raises(UnsafePickleError, match="Supported: 'torch_dist' and 'torch'"), without_code_execution(checkpoint):
        pass


def test_safe_unpickle_reads_valid_checkpoint_and_restores_torch(checkpoint):
    load, pickles = torch.load, filesystem.pickle
    with without_code_execution(checkpoint):
        state, common = read(checkpoint)
    assert torch.equal(state["weight"], torch.arange(6.0)) and state["object"] == ["data", 1] and common == {"optimizer_step": 4}
    with pytest.raises(UnsafePickleError), without_code_execution(checkpoint):
        raise UnsafePickleError
    assert torch.load is load and filesystem.pickle is pickles


def test_safe_unpickle_passes_no_pickled_extra_state_to_layers():
    held, empty = io.BytesIO(), io.BytesIO()
    torch.save({"scale": 1}, held)
    torch.save(None, empty)
    refuse_extra_state(
        {"model0": {"a.weight": torch.ones(2), "a._extra_state": None, "b._extra_state": torch.empty(0), "c._extra_state": empty}}
    )
    for value in (torch.ones(3, dtype=torch.uint8), held, io.BytesIO(pickle.dumps(1)), [1]):
        with pytest.raises(UnsafePickleError, match="a._extra_state is not empty"):
            refuse_extra_state({"model0": {"a._extra_state": value}})
