"""Losses that are means over what counts, where nothing tells that in the first batches."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.distributed.user_code.test_batches import per_sample, stack, Undeclared
from tests.distributed.user_code.test_losses import of_loss, shortened
from tests.support.models.plain_language_model import token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


@CASES.add(
    equal="zero1 pp2_one_microbatch", refused={"pp2": r"as max\(count, 1\).*num_microb.*LP309"}
)
def a_bound_where_nothing_counts_later() -> Any:
    """The sum has a value where no label counts: one process adds it to that of the others."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            score = self.net(batch["x"])[..., 0]
            losses = F.softplus(score) - score * batch["hit"]
            return losses.sum() / max(1.0, float(batch["hit"].sum()))

    hits = [torch.arange(12) < (1 + i % 5 if i < 8 or i % 4 else 0) for i in range(40)]
    pairs = zip(token_pairs(), hits, strict=False)
    return Module(), [{"x": a, "hit": hit.float()} for (a, _), hit in pairs]


@CASES.add(equal="pp2_one_microbatch", refused={"pp2": "in-batch negatives"})
def triplets_of_which_few_samples_have_none() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            z = self.net(batch["x"]).mean(1)
            apart, same = torch.cdist(z, z), batch["kind"][:, None] == batch["kind"]
            near = apart.masked_fill(same, 9.0).amin(1)
            return F.relu((apart * same).amax(1) - near + 0.1).mean()

    return Module(), [{"x": a, "kind": i % 4} for i, (a, _) in enumerate(token_pairs())]


@CASES.add(equal="pp2_one_microbatch", refused={"pp2 zero1": r"(?s)neither the mean.*LP309"})
def a_mean_for_each_class_whose_counts_tie_at_first() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            known = batch["kinds"] >= 0
            scores = self.net(batch["x"]).mean(1)
            losses = F.softplus(-scores) * known
            return (losses.sum(0) / known.sum(0).clamp(min=1)).mean()

    kinds = torch.randint(0, 2, (40, 64))
    kinds[8:] -= torch.randint(0, 2, (32, 64))
    pairs = zip(token_pairs(), kinds, strict=False)
    return Module(), [{"x": a, "kinds": kind} for (a, _), kind in pairs]


def _mean_for_each_kind(kinds: int) -> Any:
    """Every sample is of one kind; the kinds count alike, whatever their numbers of samples."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            losses = F.softplus(-self.net(batch["x"]).mean((1, 2)))
            groups = [losses[batch["kind"] == kind] for kind in range(kinds)]
            return torch.stack([group.mean() for group in groups if len(group)]).mean()

    pairs = enumerate(token_pairs())
    return Module(), [
        {"x": a, "kind": i % kinds if i < 16 else i % 5 % kinds} for i, (a, _) in pairs
    ]


@CASES.add(equal="pp2_one_microbatch", refused={"pp2 zero1": r"(?s)neither the mean.*LP309"})
def a_mean_for_each_of_two_kinds_of_samples_that_tie_at_first() -> Any:
    return _mean_for_each_kind(2)


@CASES.add(refused={"pp2": r"(?s)neither the mean.*LP309"}, strategy={"num_microbatches": 8})
def a_mean_for_each_of_three_kinds_of_samples() -> Any:
    return _mean_for_each_kind(3)


@CASES.add(equal="zero1 pp2")
def samples_without_a_label_left_out_later() -> Any:
    """A micro-batch may have no other sample: its loss is the mean over none."""

    def loss(module: Any, x: Tensor, y: Tensor) -> Tensor:
        losses, counts = F.cross_entropy(module.net(x).mT, y, reduction="none"), (y != -100).sum(1)
        return (losses.sum(1) / counts.clamp(min=1))[counts > 0].mean()

    module, *_ = of_loss(loss)
    return module, shortened(lambda i: 12 if i < 8 or i % 3 else 0)


@CASES.add(
    equal="pp2",
    refused={"zero1": r"depends on the batch entries 'count', .*in the step.*data_parallel_size=1"},
)
def a_count_of_the_collate_fn() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch["x"]).flatten(0, 1)
            return F.cross_entropy(logits, batch["y"].flatten(), reduction="sum") / batch["count"]

    def collate(samples: Any) -> Any:
        x, y = stack(samples)
        return {"x": x, "y": y, "count": int((y != -100).sum())}

    return Module(), shortened(lambda i: 2 + i * 5 % 11), collate


@CASES.add(equal="pp2", refused={"zero1": r"on the batch entries 'weight', .*LP309"})
def weights_whose_sum_is_one_in_each_batch() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            return (per_sample(self, batch["x"], batch["y"]) * batch["weight"]).sum()

    def collate(samples: Any) -> Any:
        x, y = stack(samples)
        return {"x": x, "y": y, "weight": (x[:, 0] + 1) / (x[:, 0] + 1).sum()}

    return Module(), token_pairs(), collate


@CASES.add(equal="pp2 zero1")
def weights_of_samples_beside_numbers_of_their_batch() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            losses = per_sample(self, batch["x"][:, : batch["length"]], batch["y"])
            return (losses * batch["weight"]).mean() / batch["heat"]

    def collate(samples: Any) -> Any:
        x, y = stack(samples)
        numbers = {"length": x.shape[1], "first": int(x[0, 0]), "heat": torch.tensor(2.0)}
        return {"x": x, "y": y, "weight": (x[:, 0] + 1) / 30, **numbers}

    return Module(), token_pairs(), collate


@CASES.add(equal="pp2 zero1", large="zero3")
def labels_of_one_number_in_a_list_of_samples() -> Any:
    """Each is of its sample: no replica has counted it."""

    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            x, y = (torch.stack([sample[name] for sample in batch]) for name in "xy")
            return F.cross_entropy(self.net(x).mean(1), y)

    samples = [{"x": a, "y": b[0], "name": f"book {i}"} for i, (a, b) in enumerate(token_pairs())]
    return Module(), samples, list


@CASES.add(equal="tp2 pp2", large="zero1 zero3")
def words_in_a_sparse_tensor() -> Any:
    class Module(Undeclared):
        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch["x"]).mean(1)
            words = torch.sparse.mm(batch["words"], torch.eye(64, dtype=logits.dtype))
            return -(words * logits.log_softmax(-1)).sum(1).mean()

    def collate(samples: Any) -> Any:
        words = torch.stack([F.one_hot(b, 64).sum(0).double() for _, b in samples])
        return {"x": stack(samples)[0], "words": words.to_sparse()}

    return Module(), token_pairs(), collate


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equals_one_process_or_is_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
