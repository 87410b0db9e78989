"""The table that copies synced tensors into an engine, on a small module. Real models are in test_weight_sync."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.core.rollout.engine import WeightSyncError
from megatron_grpo.core.rollout.vllm_weight_layout import CopyRecord, ModuleWeights, TensorCopy, TensorLayout, TensorView, _CopiesOfWeight
from megatron_grpo.core.weights.buckets import TensorSlice

ROWS = (2, 3)


class PackedLayer(torch.nn.Module):
    """A layer that stores `both` as loaded, and of `kept_packed` only the transpose."""

    def __init__(self):
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16), requires_grad=False)
        self.kept_packed = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.read = None


def pack(module):
    module.read = module.kept_packed.t().contiguous()
    module.kept_packed = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def make_row_view(first):
    return TensorView(ROWS, (3, 1), 3 * first)


@pytest.fixture
def layer():
    return PackedLayer()


@pytest.fixture
def table(layer):
    """up and gate are rows 0 to 3 of `both`, row 4 is padding; `packed` is made of two halves of one tensor, in the other order."""
    form = TensorLayout((4, 3), (3, 1), torch.float32)
    whole = ModuleWeights(module=layer, loaded={"both": TensorLayout.from_tensor(layer.both)},
                          live={"both": TensorLayout.from_tensor(layer.both)},
    packed=frozenset(),
                 padding=[("both", TensorView((1, 3), (3, 1), 12), 7.0)], num_copies=2)  # fmt: skip
    packed = ModuleWeights(module=layer, loaded={"kept_packed": form}, live={"kept_packed": TensorLayout.from_tensor(layer.kept_packed)},
                  packed=frozenset({"kept_packed"}), padding=[], num_copies=2)  # fmt: skip
    halves = [
        TensorCopy(1, "kept_packed", make_row_view(0), make_row_view(2)),
        TensorCopy(1, "kept_packed", make_row_view(2), make_row_view(0)),
    ]
    copies = {
        "gate": [TensorCopy(0, "both", make_row_view(0), None)],
        "up": [TensorCopy(0, "both", make_row_view(2), None)],
        "halves": halves,
        "unused": [],
    }
    return CopyRecord([whole, packed], {name: tuple(tensor.shape) for name, tensor in make_tensors().items()}, copies)


def make_tensors():
    return {"gate": torch.ones(ROWS), "up": torch.full(ROWS, 1.001), "halves": torch.arange(12.0).view(4, 3), "unused": torch.ones(1)}


def test_copy_table_load_writes_rounded_and_packed_parts(layer, table):
    assert table.load(make_tensors().items(), pack) == []
    assert layer.both.tolist() == [[1.0] * 3] * 4 + [[7.0] * 3]  # bfloat16 has no 1.001
    assert layer.read.tolist() == [[6.0, 9.0, 0.0, 3.0], [7.0, 10.0, 1.0, 4.0], [8.0, 11.0, 2.0, 5.0]]
    assert layer.kept_packed.numel() == 0 and table.is_as_learnt()


def test_copy_table_load_accepts_gaps_and_any_order(layer, table):
    named = make_tensors()
    named["halves"] = torch.arange(12.0).view(3, 4).t()  # columns
    assert table.load(reversed(named.items()), pack) == []
    assert layer.read.tolist() == [[2.0, 3.0, 0.0, 1.0], [6.0, 7.0, 4.0, 5.0], [10.0, 11.0, 8.0, 9.0]]


def test_copy_table_resolves_parameters_at_every_load(layer, table):
    table.load(make_tensors().items(), pack)
    before = layer.both.data
    layer.both.data = torch.full_like(before, float("nan"))
    table.load([(name, 2 * tensor) for name, tensor in make_tensors().items()], pack)
    assert layer.both[:4].tolist() == [[2.0] * 3] * 4 and before[0, 0] == 1.0
    layer.both.data = layer.both.data.float()
    assert not table.is_as_learnt()


def test_copy_table_load_returns_missing_tensors(layer, table):
    assert table.load([item for item in make_tensors().items() if item[0] not in ("up", "unused")], pack) == ["up"]
    assert table.load(make_tensors().items(), pack) == []
    assert layer.both[2:4].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ([("extra", torch.ones(2))], "extra was sent to the rollout engine, but is not among the 4 weights of its first update."),
        ([("up", torch.ones(3, 2))], r"up was sent with shape \[3, 2\]; in the first update it had \[2, 3\]."),
        ([("up", torch.ones(2, 3))] * 2, "up was sent to the rollout engine twice in one update."),
    ],
)
def test_copy_table_load_of_unknown_tensor_raises(table, named, sentence):
    with pytest.raises(WeightSyncError, match=sentence):
        table.load(named, pack)


def test_copy_table_requires_each_weight_covered_once():
    def covered(*places):
        return _CopiesOfWeight(
            TensorLayout((4, 3), (3, 1), torch.float32), {(str(n), place, None): None for n, place in enumerate(places)}
        ).covers_all_once()

    assert covered(make_row_view(0), make_row_view(2))
    assert (
        not covered(make_row_view(0))
        and not covered(make_row_view(0), make_row_view(1))
        and not covered(make_row_view(0), make_row_view(2), make_row_view(1))
    )
    columns = TensorView((4, 1), (3, 1), 0)
    assert covered(columns, TensorView((4, 2), (3, 1), 1)) and not covered(columns, TensorView((4, 1), (3, 1), 2))


def slice_tensors(named):
    """Each tensor row by row, and each row in two parts."""
    for name, tensor in named:
        if tensor.dim() < 2:
            yield name, tensor
            continue
        for row in range(len(tensor)):
            for begin, end in ((0, 1), (1, tensor.shape[1])):
                yield name, TensorSlice(tensor[row : row + 1, begin:end], (row, begin), tuple(tensor.shape))


def test_copy_table_load_of_slices_equals_whole_tensors(layer, table):
    assert table.load(slice_tensors(make_tensors().items()), pack) == []
    right = layer.both.clone(), layer.read.clone()
    layer.both.data.fill_(float("nan"))
    assert table.load(make_tensors().items(), pack) == []
    assert torch.equal(layer.both, right[0]) and torch.equal(layer.read, right[1])


def test_copy_table_load_returns_tensor_with_missing_slice(table):
    *named, _ = slice_tensors([("gate", make_tensors()["gate"])])
    assert "gate" in table.load([*((name, tensor) for name, tensor in make_tensors().items() if name != "gate"), *named], pack)


def test_copy_table_load_buffers_slices_of_transposed_tensor(layer, table):
    turned = TensorView((3, 4), (1, 3), 0)  # the transpose
    table.copies["halves"] = [
        TensorCopy(1, "kept_packed", TensorView((3, 4), (1, 3), 0), turned),
        TensorCopy(1, "kept_packed", make_row_view(0), make_row_view(0)),
    ]
    assert table.copies["halves"][0].start((4, 3)) is None and table.copies["halves"][1].start((4, 3)) == [0, 0]
    assert table.load(slice_tensors(make_tensors().items()), pack) == []
    assert torch.equal(layer.read, make_tensors()["halves"].t())
