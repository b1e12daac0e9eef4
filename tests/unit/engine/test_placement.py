"""The kinds of ranks are those that a look at every rank finds."""

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch

from lightning_par import check_plan
from lightning_par.engine.memory.placement import count_rank_kinds, find_placements
from lightning_par.models import Mixtral, MixtralConfig
from lightning_par.sizes import ParallelSizes

LAYOUTS = [
    ({"pipeline": 2, "data_shard": 3, "tensor": 2}, {}),
    ({"pipeline": 2, "data_shard": 2, "context": 2}, {}),
    ({"data_replicate": 2, "data_shard": 4, "expert": 2}, {}),
    ({"data_shard": 7}, {"vocab_size": 37}),  # rows that 7 does not divide, and empty shards
    ({"tensor": 2, "data_shard": 5}, {"vocab_size": 250}),
]


@pytest.mark.parametrize(("degrees", "overrides"), LAYOUTS)
def test_kinds_are_those_of_every_rank(degrees: Any, overrides: Any) -> None:
    sizes = ParallelSizes(**degrees)
    with torch.device("meta"):
        model = Mixtral(MixtralConfig.preset("tiny", num_layers=3, **overrides))
    resolved = check_plan(model, model.parallel_plan(), sizes)
    owners = tuple(range(sizes.pipeline))
    placements = find_placements(model, resolved, sizes, rank_of_stage=owners)

    def size(placement: Any, rank: int) -> int:
        shape = placement.local_shape(rank, sizes)
        return 0 if shape is None else prod(shape) * placement.dtype.itemsize

    every = range(sizes.world_size)
    held = [sum(size(p, rank) for p in placements) for rank in every]
    kinds = [(sizes.coordinates(rank)["pp"], held[rank]) for rank in every]
    assert [
        (kind.first, kind.count, kind.size) for kind in count_rank_kinds(placements, sizes)
    ] == [(kinds.index(kind), count, kind[1]) for kind, count in Counter(kinds).items()]
    for placement in placements:
        assert placement.most_bytes == max(size(placement, rank) for rank in every)
