"""Steps of modules without a plan that make tensors, or read and write weights themselves."""

import copy
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from tests.support.models import structures
from tests.support.models.plain_language_model import token_pairs
from tests.support.models.structures import Planless
from tests.support.user_code import Cases

CASES = Cases(__name__)


class _Stepwise(Planless):
    """Calls the parts of its model by itself."""

    def __init__(self) -> None:
        super().__init__(structures.LanguageModel())

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.net.tokens(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.net.head(self.net.norm(hidden))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embedded(batch[0])
        for layer in self.net.layers:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.logits(hidden).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss


@CASES.add(equal="tp2 pp2")
def tensors_of_the_default_dtype_beside_weights_in_double() -> Any:
    class Module(_Stepwise):
        def embedded(self, tokens: Tensor) -> Tensor:
            return F.linear(super().embedded(tokens), torch.eye(32), torch.full((32,), 0.5))

    return Module().double(), token_pairs()


@CASES.add(equal="tp2 pp2")
def one_part_in_double() -> Any:
    """The precision of the run converts all weights, in whatever dtype they were made."""
    module = _Stepwise()
    module.net.head.double()
    return module, token_pairs()


@CASES.add(equal="tp2 pp2")
def teacher_whose_head_is_its_table() -> Any:
    """A copy of a model whose table comes before the head; the size of the vocabulary is one."""

    class Module(Planless):
        def __init__(self) -> None:
            super().__init__(structures.EncoderOfTorch())
            self.net.head.weight = self.net.tokens.weight
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(batch[0])
            logits = self.net(batch[0])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            loss = loss + F.mse_loss(logits, wanted)
            self.log("loss", loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


@CASES.add(equal="tp2 pp2")
def layers_that_the_step_makes() -> Any:
    class Module(_Stepwise):
        def embedded(self, tokens: Tensor) -> Tensor:
            return nn.LayerNorm(32)(super().embedded(tokens))

    return Module(), token_pairs()


@CASES.add(equal="tp2 tp2_whole_sequence")
def penalties_on_weights_of_layers() -> Any:
    class Module(_Stepwise):
        def logits(self, hidden: Tensor) -> Tensor:
            layer = self.net.layers[0]
            small = layer.norm1.weight.square().sum() + layer.attn.query.weight.abs().mean()
            scale = 1 + 1e-2 * (small + self.net.tokens.weight.data.norm())
            return scale * F.linear(self.net.norm(hidden), self.net.head.weight)

    return Module(), token_pairs()


@CASES.add(equal="tp2 zero3", refused={"pp2": r"a parameter of net\.layers\.0"})
def weights_of_layers_that_the_step_bounds() -> Any:
    class Module(_Stepwise):
        def embedded(self, tokens: Tensor) -> Tensor:
            for parameter in self.net.layers.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            return super().embedded(tokens)

    return Module(), token_pairs()


@CASES.add(equal="tp2 zero3", refused={"pp2": r"net\.tokens\.weight.*on_train_batch_start"})
def rows_of_a_table_that_the_step_normalizes() -> Any:
    class Module(_Stepwise):
        def embedded(self, tokens: Tensor) -> Tensor:
            with torch.no_grad():
                table = self.net.tokens.weight
                table.copy_(F.normalize(table, dim=1))
                table[0].zero_()
            return super().embedded(tokens)

    return Module(), token_pairs()


def _scaled_late(*, again: bool) -> Any:
    class Module(_Stepwise):
        def embedded(self, tokens: Tensor) -> Tensor:
            table = self.net.tokens.weight
            hidden = super().embedded(tokens)
            with torch.no_grad():
                (self.net.tokens.weight if again else table).mul_(0.9)
            return hidden

    return Module(), token_pairs()


@CASES.add(
    equal="zero3", refused={"tp2": r"net\.tokens\.weight through .* directly before you write"}
)
def a_table_that_the_step_scales_after_it_called_its_layer() -> Any:
    return _scaled_late(again=False)


@CASES.add(equal="tp2")
def a_table_that_the_step_reads_again_and_scales() -> Any:
    return _scaled_late(again=True)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)
