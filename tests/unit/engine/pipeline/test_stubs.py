"""What stands for modules of other pipeline stages."""

import pytest
import torch
from torch import nn, Tensor

from lightning_par.engine.pipeline.stage import (
    AbsentModule,
    GhostModule,
    LaterBlock,
    MicroBatchState,
    Stage,
    StageStub,
)
from lightning_par.errors import PipelineError


class Scaled(nn.Embedding):
    """Asks for values of what it gives."""

    def forward(self, tokens: Tensor) -> Tensor:
        found = super().forward(tokens)
        return found * (2 if found.abs().max().item() > 1 else 1)


def test_a_module_of_the_first_stage_gives_nans_of_its_shapes() -> None:
    found = GhostModule(nn.Embedding(8, 4), "net.emb")(torch.zeros(2, 3, dtype=torch.long))
    assert found.shape == (2, 3, 4)
    assert found.isnan().all()


def test_a_module_that_needs_values_is_named_with_the_cure() -> None:
    ghost = GhostModule(Scaled(8, 4), "net.emb")
    with pytest.raises(
        PipelineError, match=r"net\.emb is on another pipeline stage.*shapes.*replicated="
    ):
        ghost(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("kind", [GhostModule, AbsentModule, LaterBlock])
def test_a_stub_is_an_instance_of_the_class_of_its_module_while_a_step_runs(
    kind: type[GhostModule],
) -> None:
    stage = Stage(0, [(0, 1), (1, 2)], ())
    stub, listed = (kind(m, "net.x", stage) for m in (nn.Embedding(8, 4), nn.ModuleList()))
    assert not isinstance(stub, nn.Embedding)
    with stage.hold(MicroBatchState()):
        assert isinstance(stub, nn.Embedding)
        assert isinstance(stub, StageStub)
        assert not isinstance(stub, nn.Linear)
        assert not isinstance(listed, nn.ModuleList)
    assert not isinstance(stub, nn.Embedding)
