"""Where a Hugging Face model can be cut into stages: its blocks, and what is around them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_par.huggingface.use_order import UseOrder
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.stage_partition import classify_units, Place

__all__ = ["Stages", "find_stages"]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The fields of a `ParallelPlan` that a pipeline reads.

    Attributes:
        containers: FQNs of the lists of blocks, in the order in which they run.
        first: As in the plan.
        last: As in the plan.
        replicated: As in the plan.
        kept: As in the plan.
    """

    containers: tuple[str, ...]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def blocks(self) -> str | tuple[str, ...] | None:
        """The containers as the plan names them."""
        if len(self.containers) < 2:
            return self.containers[0] if self.containers else None
        return self.containers


def find_stages(model: Any) -> Stages:
    """Find the blocks of a model, and the stage of what is around them.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.
    """
    # In the order of running: an encoder is often defined behind the decoder.
    order = UseOrder(model, [fqn for root in _towers(model) for fqn in _lists(model, root)])
    if isinstance(getattr(model, "logit_scale", None), nn.Parameter):
        # Of two towers whose outputs meet in the loss, the blocks are those of the one that runs
        # first: what runs after them is at hand where the loss is computed.
        order = UseOrder(model, order.containers[:1])
    places = _places(model, order)
    lists = [(c, model.get_submodule(c).named_children()) for c in order.containers]
    blocks = [f"{container}.{name}" for container, named in lists for name, _ in named]
    if _reads_all_hidden_states(model):
        # All hidden states begin with what goes into the first block, so that what makes it is
        # needed again behind the last one.
        units = classify_units(model, ParallelPlan(blocks=order.containers))
        places |= {fqn: "every" for fqn, place in units.items() if place == "first"}
    return Stages(
        containers=order.containers,
        kept=tuple(blocks) if _reads_all_hidden_states(model) else (),
        **{
            role: tuple(fqn for fqn, place in places.items() if place == wanted)
            for role, wanted in (("first", "first"), ("last", "last"), ("replicated", "every"))
        },
    )


def _reads_all_hidden_states(model: Any) -> bool:
    names = ("output_hidden_states", "use_weighted_layer_sum")
    return any(getattr(model.config, name, False) for name in names)


def _towers(model: Any) -> list[str]:
    """Return the FQNs of the parts with a stack of blocks each: encoder, decoder, or the model."""
    if isinstance(getattr(model, "logit_scale", None), nn.Parameter):
        # Two towers beside each other (CLIP).
        return [n for n in ("text_model", "vision_model") if n in model._modules] or [""]
    if not getattr(model.config, "is_encoder_decoder", False):
        return [""]
    names = {module: name for name, module in model.named_modules()}
    parts = (getattr(model, f"get_{part}", lambda: None)() for part in ("encoder", "decoder"))
    towers = [names[part] for part in parts if part is not None and part in names]
    # Otherwise the model as a whole: one list of blocks is found in it.
    return towers if len(towers) == 2 and all(towers) else [""]


def _lists(model: nn.Module, root: str) -> list[str]:
    """Return the FQN of the list of blocks in a part of a model; if the list holds lists, theirs.

    It is the largest of those with as many entries as the configuration has layers, or of all.
    Nothing is found where every block is spread over several lists, as attention and feed-forward.
    """
    part = model.get_submodule(root)
    found = {
        f"{root}.{name}".strip("."): module
        for name, module in part.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    }
    # `num_hidden_layers`, `n_layers`, `decoder_layers`...: models name it differently.
    depths = {v for n, v in vars(model.config).items() if "layers" in n and isinstance(v, int)}
    size = {fqn: sum(p.numel() for p in module.parameters()) for fqn, module in found.items()}
    largest = max(found, key=lambda f: (len(found[f]) in depths, size[f]), default=None)
    if largest is None:
        return []
    # Lists of blocks in a list, as stages of a vision model.
    inner = [f"{largest}.{name}" for name, _ in found[largest].named_children()]
    if all(fqn in found for fqn in inner):
        return inner
    # Two lists of one length side by side hold halves of each block, and no cut is between
    # blocks.
    parent, count = largest.rpartition(".")[0], len(inner)
    beside = [f for f in found if f.rpartition(".")[0] == parent and len(found[f]) == count]
    return [largest] if len(beside) == 1 or count == 1 else []


def _given_to_blocks(model: Any, container: str, units: Mapping[str, Place]) -> Iterator[str]:
    """Yield what stands beside a list of blocks and may be given to each of them, as a table of
    relative positions is: all but what looks like an embedding that is added to the first input.
    """
    parent = container.rpartition(".")[0]
    width = getattr(model.config, "hidden_size", None)
    for name, module in model.get_submodule(parent).named_children():
        fqn = f"{parent}.{name}".strip(".")
        # A table as wide as the hidden states is added to them once, before the blocks.
        if units.get(fqn) == "first" and not any(
            isinstance(m, nn.Conv1d | nn.Conv2d) or getattr(m, "embedding_dim", None) == width
            for m in module.modules()
        ):
            yield fqn


def _places(model: nn.Module, order: UseOrder) -> dict[str, Place]:
    """Return FQN -> place of what is not used where it is defined."""
    units = classify_units(model, ParallelPlan(blocks=order.containers))
    owners = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    last, places = len(order.containers), dict[str, Place]()
    for fqn, (low, high) in order.spans.items():
        if not any(f"{name}.".startswith(fqn + ".") for name in owners):
            continue
        # high 0: no use after any container has run. low = last: none before all have.
        place: Place = "first" if high == 0 else "last" if low == last else "every"
        if fqn in owners and place == "first":
            place = "every"  # a bare parameter may be given to each of the blocks
        # Where the structure puts it (`classify_units`); only what differs has to be said.
        defined = next((p for u, p in units.items() if f"{fqn}.".startswith(u + ".")), None)
        if defined is not None and place != defined and defined != "every":
            places[fqn] = place
    for container in order.containers:
        places |= dict.fromkeys(_given_to_blocks(model, container, {**units, **places}), "every")
    # A plan gives one role to a module and all that is in it.
    for fqn in list(places):
        # Of parts with different places the whole is needed on every stage.
        outer = [f for f in places if fqn.startswith(f + ".")]
        for name in outer:
            if places[name] != places[fqn]:
                places[name] = "every"
            places.pop(fqn, None)
    return places
