"""Laws of splitting batches and counting what a loss averages over."""

from collections import defaultdict, namedtuple, OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch

from lightning_par.engine.batch import (
    batch_entry,
    batch_size,
    count_valid,
    cut_batch,
    find_batch_dims,
    signature,
    split_batch,
    take_samples,
    with_entries,
)
from lightning_par.engine.tensor_tree import map_tensors, tensors_of
from lightning_par.errors import ConfigurationError, PlanError
from lightning_par.plan.parallel_plan import BatchLayout

Pair = namedtuple("Pair", ["ids", "name"])


class Encoding(UserDict):
    """As a tokenizer returns it: a mapping that holds something beside its items."""

    def __init__(self, data=None, spans=None):
        super().__init__(data)
        self.spans = spans


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def nested(size):
    """A batch of every container."""
    return OrderedDict(
        text=Pair(numbers(size, 5), "books"),
        parts=[numbers(size, 2, 3), (torch.tensor(0.5), None)],
        more=Encoding({"mask": numbers(size) % 2 == 0}, spans="kept"),
        table=numbers(3, 5) if size != 3 else numbers(2, 5),
    )


@pytest.mark.parametrize(("size", "count"), [(7, 3), (7, 7), (7, 1), (5, 2), (2, 5), (1, 3)])
def test_micro_batches_hold_every_sample_once_in_order(size, count):
    parts = split_batch(nested(size), count)
    sizes = [part["text"].ids.shape[0] for part in parts]
    assert len(parts) == min(size, count)
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    whole = nested(size)
    assert torch.equal(torch.cat([p["text"].ids for p in parts]), whole["text"].ids)
    assert torch.equal(torch.cat([p["parts"][0] for p in parts]), whole["parts"][0])
    assert torch.equal(torch.cat([p["more"]["mask"] for p in parts]), whole["more"]["mask"])


def test_splitting_keeps_containers_and_what_has_no_batch_dim():
    whole = nested(7)
    for part in split_batch(whole, 3):
        assert type(part) is OrderedDict
        assert type(part["text"]) is Pair
        assert part["text"].name == "books"
        assert type(part["parts"]) is list
        assert type(part["parts"][1]) is tuple
        assert part["parts"][1] == (torch.tensor(0.5), None)
        assert type(part["more"]) is Encoding
        assert part["more"].spans == "kept"
        assert torch.equal(part["table"], whole["table"])


def test_splitting_shares_memory_with_the_batch():
    whole = numbers(7, 2)
    assert split_batch(whole, 3)[1].data_ptr() == whole[3].data_ptr()


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, lambda d: defaultdict(list, d)])
def test_mappings_are_rebuilt_in_their_class_and_the_original_is_left_alone(kind):
    batch = kind({"x": torch.ones(2), "y": {"z": torch.zeros(3)}})
    mapped = map_tensors(batch, lambda t: t + 5)
    assert type(mapped) is type(batch)
    assert mapped["x"].tolist() == [6, 6]
    assert mapped["y"]["z"].tolist() == [5, 5, 5]
    assert batch["x"].tolist() == [1, 1]


def test_tensors_come_in_a_fixed_order():
    shapes = [tuple(t.shape) for t in tensors_of(nested(7))]
    assert shapes == [(7, 5), (7, 2, 3), (), (7,), (3, 5)]


def test_batch_size_is_that_of_the_first_tensor_with_dims():
    assert batch_size((torch.tensor(2.0), numbers(5, 3), numbers(7))) == 5


@pytest.mark.parametrize("batch", [{}, {"x": torch.tensor(1.0)}, ["text", 3]])
def test_a_batch_without_a_batch_dim_is_refused(batch):
    with pytest.raises(ConfigurationError, match="no tensor with a batch dim"):
        batch_size(batch)
    assert split_batch(batch, 2) == [batch]  # nothing has to be cut
    assert count_valid(batch, LAYOUT) == 1


def test_entries_are_found_by_path():
    batch = {"text": Encoding({"labels": ["a", (1, "b")]}), 3: "three"}
    assert batch_entry(batch, "text.labels.1.1") == "b"
    assert batch_entry((5, [7, 9]), "1.0") == 7


@pytest.mark.parametrize(
    ("batch", "path", "message"),
    [
        ({"ids": 1, "label": 2}, "labels", r"'labels', but the batch has \['ids', 'label'\]"),
        ((1, 2), "2", r"'2', but the batch has 2 entries \(tuple\)"),
        ({"text": {"ids": 1}}, "text.labels", r"'text.labels', but 'text' has \['ids'\]"),
        ({"ids": torch.ones(2)}, "ids.0", r"'ids.0', but 'ids' is a Tensor"),
    ],
)
def test_an_absent_entry_is_refused_with_what_there_is(batch, path, message):
    with pytest.raises(PlanError, match=message):
        batch_entry(batch, path)


LAYOUT = BatchLayout()
LABELS = torch.tensor([[3, -100, 5, 7, -100], [-100, -100, 2, -100, 9]])


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"labels": None}, 2),
        ({"labels": "y"}, 5),
        ({"labels": "y", "ignore_index": 3}, 9),
        ({"labels": "y", "label_shift": 1}, 4),
        ({"labels": "y", "label_shift": 3}, 2),
        ({"labels": "y", "label_shift": 1, "sequence_dims": {"y": 0}}, 2),
    ],
)
def test_valid_entries_are_the_labels_that_are_not_ignored_after_the_shift(fields, count):
    got = count_valid({"x": numbers(2, 7), "y": LABELS}, BatchLayout(**fields))
    assert (got.dtype, got.shape, got.item()) == (torch.float64, (), count)


def test_counts_of_micro_batches_sum_to_that_of_the_batch():
    batch = {"y": LABELS.repeat(4, 1)[:7]}
    layout = BatchLayout(labels="y", label_shift=1)
    parts = [count_valid(part, layout).item() for part in split_batch(batch, 3)]
    assert sum(parts) == count_valid(batch, layout).item()
    assert len(set(parts)) > 1


def test_a_signature_tells_shapes_dtypes_and_extras_and_nothing_else():
    batch = nested(5)
    assert signature(batch, "fit") == signature(map_tensors(batch, torch.zeros_like), "fit")
    assert hash(signature(batch)) == hash(signature(nested(5)))
    others = [signature(nested(7)), signature(batch, "fit")]
    others.append(signature(map_tensors(batch, lambda t: t.double())))
    assert signature(batch) not in others


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list
    note: str = "kept"


class Graph:
    def __init__(self, x):
        self.x, self.note = x, "kept"

    def to(self, device):
        return self


def test_objects_are_split_by_their_attributes():
    batch = {"s": Sample(numbers(5, 2), list("abcde")), "g": Graph(numbers(5))}
    parts = split_batch(batch, 2)
    assert [p["s"].x.shape[0] for p in parts] == [3, 2]
    assert [p["s"].names for p in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [p["g"].x.tolist() for p in parts] == [[0, 1, 2], [3, 4]]
    assert {p["s"].note + p["g"].note for p in parts} == {"keptkept"}
    assert batch["g"].x.shape[0] == 5  # the original is left alone


def test_entries_of_objects_are_found_by_name_and_by_place():
    batch = (Sample(numbers(2), []), Pair(numbers(3), "n"))
    assert batch_entry(batch, "0.x") is batch_entry(batch, "0.0") is batch[0].x
    assert batch_entry(batch, "1.name") == batch_entry(batch, "1.1") == "n"
    changed = with_entries(batch, {"0.x": 7, "1.name": "m"})
    assert (changed[0].x, changed[1].name, changed[0].note) == (7, "m", "kept")


def dims_of(batch, sizes=(), known=(), **declared):
    return find_batch_dims(batch, BatchLayout(**declared), sizes, known)


def test_the_batch_dim_is_told_by_declared_entries_then_loaders_then_agreement():
    batch = {"classes": numbers(9), "x": numbers(4, 2), "y": numbers(4)}
    assert dims_of(batch, labels="y").dims == {"x": 0, "y": 0}
    assert dims_of(batch, [4]).size == 4
    assert dims_of(batch, whole=("classes",)).size == 4
    assert dims_of(batch, known=["x"]).others == ("classes",)
    unsure = dims_of(batch)
    assert "'classes' has 9, 'x' has 4" in unsure.unsure


def test_a_batch_larger_than_what_the_loader_gives_is_not_sure():
    assert "the loader gives 8 samples" in dims_of({"x": numbers(24)}, [8]).unsure
    assert not dims_of({"x": numbers(5)}, [8]).unsure  # the last batch


def test_declared_dims_and_whole_entries_are_followed():
    batch = {"x": numbers(3, 4), "table": numbers(4, 4), "y": numbers(4)}
    dims = dims_of(batch, batch_dims={"x": 1}, whole=("table",))
    assert dims.dims == {"x": 1, "y": 0}
    part = cut_batch(batch, dims, 1, 2)
    assert [tuple(part[k].shape) for k in batch] == [(3, 2), (4, 4), (2,)]
    assert take_samples(batch, dims, [3, 0])["y"].tolist() == [3, 0]
    with pytest.raises(PlanError, match=r"different numbers of samples: {'y': 4, 'x': 3}"):
        dims_of(batch, batch_dims={"x": 0}, labels="y")


def test_lists_of_one_value_per_sample_are_told_from_lists_of_entries():
    images = [numbers(3, n) for n in (4, 5, 6, 7)]
    batch = (images, [{"box": numbers(4)} for _ in images], ["a"] * 4)
    assert dims_of(batch, [4]).dims == {"0": 0, "1": 0, "2": 0}
    assert dims_of([numbers(2, 5), numbers(2)]).dims == {"0": 0, "1": 0}
    assert dims_of(["a", "b", "c"]).size == 3


def test_a_pair_of_lists_stays_one_in_a_batch_of_two_samples():
    """As torchvision's ``collate_fn=lambda samples: tuple(zip(*samples))`` makes it."""
    four, two = [tuple(zip(*[(torch.ones(3), {"y": 1})] * n, strict=True)) for n in (4, 2)]
    assert dims_of(four, sizes=[4]).dims == {"0": 0, "1": 0}
    assert dims_of(two, known=("0", "1")).dims == {"0": 0, "1": 0}
    # Also in a first batch, as lists of one kind each are no samples; of mixed ones they are.
    assert dims_of(two, sizes=[2]).dims == {"0": 0, "1": 0}
    assert dims_of([*zip(*two, strict=True)], sizes=[2]).dims == {"": 0}
    alike = [torch.ones(3)] * 2
    assert dims_of((alike, alike), known=("0", "1")).dims == {"0": 0, "1": 0}
