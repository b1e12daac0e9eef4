"""The two forms of a module, without processes."""

from typing import Any

import torch
from torch import nn

from lightning_par.strategies.components.module_forms import ModuleForms


def test_dicts_of_a_module_may_have_other_tensors_as_keys_in_the_parallel_form() -> None:
    module: Any = nn.Linear(3, 3)
    before, after = torch.zeros(2), torch.zeros(2)
    module.seen = {before: 1}
    forms = ModuleForms(module)
    del module.seen[before]
    module.seen[after] = 1
    forms.become_parallel()
    forms.show_whole({})
    assert next(iter(module.seen)) is before
    forms.show_parallel()
    assert next(iter(module.seen)) is after
