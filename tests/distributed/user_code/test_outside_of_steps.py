"""docs/outside_of_steps.md says of every hook what it sees of a divided module; here it is read on
meshes, and compared with one process.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.proofs import assert_proofs_exist
from tests.support.ranks.api import run_ranks
from tests.support.user_code import strategy_of, world_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "outside_of_steps.md"
LAYOUTS = ("tp2", "pp2", "zero3", "zero2_offload")
CELLS: dict[str, dict[str, str]] = {
    "whole": {},
    "whole; offload: none": {"zero2_offload": "less"},
    "none": {},
    "parts": dict.fromkeys(LAYOUTS, "other"),
}
"""What a cell of the page says -> where it is not what one process has."""
ELSEWHERE = {
    "`on_load_checkpoint`": """
        resume::test_hooks_states_and_edits_of_a_resumed_run_are_those_of_one_process""",
    "after `fit`": """
        distributed/test_module_after_run.py::test_module_is_whole_and_plain_after_a_fit
        distributed/test_module_after_run.py::test_same_trainer_fits_and_saves_again""",
}
"""Lines of the page that other tests prove."""
_CHECKPOINTS = "seen_checkpoints::test_a_hook_on_a_checkpoint_sees_that_of_one_process"
_HERE = "outside_of_steps::test_a_hook_sees_what_the_page_says"
SENTENCES = {
    "In the table of hooks, *whole* means": f"""
        {_HERE} gradients::what_all_weights_and_gradients_give
        hooks::a_state_dict_that_all_ranks_save hooks::arrays_of_parts_before_the_update
        hooks::arrays_of_whole_tensors_before_the_update
        cures_of_steps::gradients_while_batches_add_up""",
    "The `checkpoint` that `on_save_checkpoint` gets": f"""
        {_CHECKPOINTS}
        distributed/test_module_after_run.py::test_parts_stay_where_whole_modules_are_not_wanted""",
    "In the table of hooks, *none* means": _HERE,
    "In the table of hooks, *parts* means": _HERE,
    "These operations run a collective": """
        calls_on_one_rank::test_a_call_on_one_rank_is_named
        distributed/faults/test_ranks.py::test_a_rank_that_communicates_alone_ends_every_process_and_is_named
        cures_of_steps::a_decision_that_is_broadcast""",
    "Use `trainer.strategy.whole()`": """
        whole_module::an_average_by_hand whole_module::pruning_by_magnitude
        whole_module::statistics_of_samples whole_module::samples_on_rank_zero""",
    "Every rank has to enter and leave": """
        whole_module::on_one_rank_alone whole_module::in_every_hook whole_module::in_a_step
        distributed/test_module_after_run.py::test_same_trainer_fits_and_saves_again""",
    'With `whole(on="every")`': """
        whole_module::other_values_on_each_rank whole_module::pruning_on_rank_zero
        whole_module::samples_on_rank_zero""",
    "Inside the `whole()` context, gradients are None": """
        whole_module::an_average_by_hand whole_module::statistics_of_samples""",
    "The `whole()` context gathers all weights once": """
        whole_module::test_what_the_whole_module_costs
        whole_module::test_others_wait_no_longer_than_the_timeout""",
    "Lightning's own strategies do not have `whole()`": """
        whole_module::test_equal_or_refused""",
}
"""How a paragraph or bullet of the page begins -> the tests that prove it."""


class Scaled(PlainNet):
    """Has buffers in all blocks, of which there is one for each of two stages: every tensor is read
    in every hook.
    """

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[2:]
        for number, block in enumerate(self.blocks):
            block.register_buffer("scale", torch.linspace(0, number + 1, 32))
        self.register_buffer("count", torch.ones(3))


def norms(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a number of each tensor, in their order."""
    return {n: None if t is None else float(t.detach().norm()) for n, t in named.items()}


def weights(module: Any) -> Any:
    state = norms(module.net.state_dict())
    tensors = norms(dict([*module.named_parameters(), *module.named_buffers()]))
    return tensors, list(state), state, modules(module.net)


def modules(net: torch.nn.Module) -> Any:
    own = [isinstance(part, torch.nn.LayerNorm) for part in net.modules()]
    each = norms({name: part.weight for name, part in net.named_modules() if "norm" in name})
    biases = {n: net.get_submodule(n).bias is None for n, _ in net.named_modules() if "norm" in n}
    return [name for name, _ in net.named_modules()], own, each, biases


def gradients(module: Any) -> Any:
    return norms({name: p.grad for name, p in module.named_parameters()})


def states(module: Any) -> Any:
    found: dict[str, Any] = {}
    for optimizer in module.trainer.optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for number, p in enumerate(held):
            kept = optimizer.state.get(p, {})
            found |= {f"{number}.{key}": kept[key] for key in kept}
    return norms(found)


def called(module: Any) -> Any:
    with torch.no_grad():
        return float(module.net(torch.arange(8).view(2, 4)).pow(2).mean())


READS: dict[str, Callable[[Any], Any]] = {
    "weights, buffers, `state_dict()`": weights,
    "gradients": gradients,
    "optimizer states": states,
    "a call of the model": called,
}
TOGETHER = (
    ("weights, buffers, `state_dict()`", "gradients", "optimizer states"),
    ("a call of the model",),
)
"""Keys of `READS` that are read in the same runs; a call, which computes, has runs of its own."""
Asked = Mapping[str, tuple[str, ...]]
"""A key of `READS` -> the hooks in which it is read."""
HOOKS = [
    *("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start"),
    *("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("on_train_batch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end"),
    *("on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end"),
    *("on_fit_end", "teardown"),
]


class Reader(PlainModule):
    """Reads each of some things in some hooks."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(Scaled())
        self.asked = asked
        self.found: dict[str, dict[str, list[Any]]] = {thing: {} for thing in asked}

    def read(self, hook: str) -> None:
        for thing, hooks in self.asked.items():
            if hook in hooks:
                self.found[thing].setdefault(hook, []).append(READS[thing](self))

    def configure_optimizers(self) -> Any:
        self.read("configure_optimizers")
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def optimizer_step(self, epoch: int, i: int, optimizer: Any, closure: Any = None) -> None:
        def run() -> Any:
            loss = closure()
            self.read("`optimizer_step`, after the closure")
            return loss

        self.read("`optimizer_step`, before the closure")
        optimizer.step(closure=run)
        self.read("`optimizer_step`, after the step")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _reading(name: str) -> Callable[..., None]:
    def hook(self: Reader, *_: Any, **__: Any) -> None:
        self.read(name)

    return hook


for each in HOOKS:
    if each not in vars(Reader):
        setattr(Reader, each, _reading(each))


class Saves(pl.Callback):
    """Reads what the module does, too, before a save."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {thing: [] for thing in READS}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        for thing, hooks in pl_module.asked.items():
            if "on_save_checkpoint" in hooks:
                self.found[thing].append(READS[thing](pl_module))


def rows() -> dict[str, list[str]]:
    """Give the other cells of every line of the first table of the page, by its first one."""
    table = PAGE.read_text().split("\n## ")[1]
    lines = re.findall(r"^\| (.+) \|$", table, re.MULTILINE)
    cells = [re.split(r" \| ", line) for line in lines]
    return {first: rest for first, *rest in cells[1:]}


def hooks_of(row: str) -> list[str]:
    """Give the hooks of a line, which may name several."""
    if row.startswith("`optimizer_step`"):
        return [row]
    return re.findall(r"`(\w+)`", row)


def cells_of(thing: str) -> dict[str, str]:
    """Give what the page says of a thing in each hook."""
    column = list(READS).index(thing)
    proved = {row: cells for row, cells in rows().items() if row not in ELSEWHERE}
    return {hook: cells[column] for row, cells in proved.items() for hook in hooks_of(row)}


def fit(layout: str | None, rank: int, world: int, asked: Asked) -> Any:
    seed_everything(0, verbose=False)
    module, samples = Reader(asked), token_pairs(16)
    replicas = 2 if (layout or "").startswith("zero") else 1
    sampler: Any = None
    if replicas > 1:
        sampler = DistributedSampler(samples, 2, rank, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(samples, 8 // replicas, sampler=sampler)
    saves = Saves()
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy_of(layout) if layout else "auto",
        max_epochs=1,
        limit_val_batches=2,
        precision="64-true",
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[saves, ModelCheckpoint("checkpoints", every_n_train_steps=2)],
    )
    trainer.fit(module, loader, loader)
    assert "on_save_checkpoint" not in vars(saves)  # what surrounds hooks is gone
    for thing, found in module.found.items():
        assert saves.found[thing] == found.get("on_save_checkpoint", [])
    return module.found


@cache
def one_process(things: tuple[str, ...]) -> Any:
    try:
        return fit(None, 0, 1, {thing: tuple(cells_of(thing)) for thing in things})
    finally:
        torch.set_default_dtype(torch.float32)


def _fit_rank(rank: int, world: int, layout: str, asked: Asked) -> Any:
    return fit(layout, rank, world, asked)


def numbers(found: Any) -> list[float]:
    """Give all numbers in what was read."""
    if isinstance(found, Mapping | list | tuple):
        values = found.values() if isinstance(found, Mapping) else found
        return [number for value in values for number in numbers(value)]
    return [found] if isinstance(found, float) else []


def names(found: Any) -> str:
    """Give what was read without its numbers."""
    return re.sub(r"[\d.e+-]+(?=[,)}\]])", "number", str(found))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("things", TOGETHER, ids=["state", "a call"])
def test_a_hook_sees_what_the_page_says(
    things: tuple[str, ...], layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    says = {
        (thing, hook): CELLS[cell].get(layout, "equal")
        for thing in things
        for hook, cell in cells_of(thing).items()
    }
    asked = {thing: tuple(cells_of(thing)) for thing in things}
    wanted = one_process(things)
    for found in run_ranks(_fit_rank, world_of(layout), layout, asked, timeout=180):
        for thing, hooks in asked.items():
            assert set(found[thing]) == set(hooks)
        for place in ((thing, hook) for thing, hooks in asked.items() for hook in hooks):
            got, want = (each[place[0]][place[1]] for each in (found, wanted))
            if says[place] == "less":
                assert len(numbers(got)) < len(numbers(want)), place
            elif says[place] == "other":
                assert numbers(got) != pytest.approx(numbers(want)), place
            else:
                assert names(got) == names(want), place
                assert numbers(got) == pytest.approx(numbers(want), rel=1e-6), place


def test_every_hook_has_its_line() -> None:
    named = [hook for row in rows() for hook in hooks_of(row)]
    assert len(named) == len(set(named))
    assert set(HOOKS) <= set(named)
    assert {cell for cells in rows().values() for cell in cells} <= {*CELLS}
    for row, proofs in ELSEWHERE.items():
        assert row in rows()
        assert_proofs_exist(proofs)


def test_every_sentence_has_its_test() -> None:
    _, *sections = PAGE.read_text().split("\n## ")
    # Without titles, tables and code.
    blocks = [b for part in sections for b in re.split(r"\n(?=- |\n)\n?", part)[1:]]
    said = [block.removeprefix("- ") for block in blocks if block[:1] not in ("", "|", "`")]
    said = [block for block in said if not block.startswith(("def ", "    "))]
    assert len(said) == len(SENTENCES)
    for block, (begin, proofs) in zip(said, SENTENCES.items(), strict=True):
        assert block.startswith(begin)
        assert_proofs_exist(proofs)
