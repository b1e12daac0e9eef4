"""Weights and optimizer states under global names and global shapes: what this rank holds, what
rank 0 gathers, and what a rank takes out of a checkpoint.

What is gathered is what one process has: `Trainer()` reads it, and any layout what it wrote.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.checkpoint.optimizer_groups import (
    by_name,
    check_groups,
    merge_names,
    torch_state,
)
from lightning_par.checkpoint.pieces import cut_piece, Piece
from lightning_par.checkpoint.progress import counted
from lightning_par.checkpoint.tensor_files import StoredTensor, StoredTensors
from lightning_par.checkpoint.unread_tensor import read_part, UnreadTensor
from lightning_par.dtensor import full_tensors, local_box, local_part
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.errors import CheckpointError
from lightning_par.huggingface import adapt_weights
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import canonical_names

__all__ = ["StateMap", "named_tensors", "state_like"]


class StateMap:
    """Translates between the states that this rank holds and those of one process.

    Args:
        mesh: Mesh over which the states are sharded.
        state_order: Keys of the whole model's `state_dict`, in order.
        parameter_order: Canonical FQNs of the whole model's parameters, in order.
        canonical: FQN of every parameter -> its canonical FQN.

    Attributes:
        given: Id of every parameter of the whole model -> its name and itself.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        state_order: Sequence[str],
        parameter_order: Sequence[str],
        canonical: Mapping[str, str],
    ) -> None:
        self._mesh, self._canonical, self._state_order = mesh, dict(canonical), list(state_order)
        self._rank_of = {name: i for i, name in enumerate(parameter_order)}
        # Pruning gives a parameter another name during a run. Held, so that ids stay theirs.
        self.given: dict[int, tuple[str, nn.Parameter]] = {}
        self._tied: dict[str, list[str]] = {}
        for name, first in self._canonical.items():
            self._tied.setdefault(first, []).append(name)

    @classmethod
    def of_whole(cls, module: nn.Module, mesh: ParallelMesh) -> "StateMap":
        """Return the map of a module that is not on the mesh yet."""
        named = dict(module.named_parameters())
        made = cls(mesh, list(module.state_dict()), list(named), canonical_names(module))
        made.given = {id(p): (name, p) for name, p in named.items()}
        return made

    @property
    def tied(self) -> Iterable[Sequence[str]]:
        """The names of each parameter, in order."""
        return self._tied.values()

    @property
    def order(self) -> Sequence[str]:
        """Keys of the whole model's state dict, in order."""
        return self._state_order

    def place(self, name: str) -> int:
        """Return the place of a parameter among those of the whole model."""
        return self._rank_of[name]

    def gather_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole state dict on rank 0, on the CPU; elsewhere an empty dict.

        Args:
            state: State dict of this rank's part of the module.

        **Communicates**: all-gathers of every shard, then one gather over the stages.
        """
        local = _on_host(state)
        merged: dict[str, Any] = {}
        for part in self._gather_stages(local):
            merged.update(part)
        order = [name for name in self._state_order if name in merged]
        # As `state_dict()` of one process has it; what only a hook has added comes last.
        return {name: merged[name] for name in [*order, *(merged.keys() - set(order))]}

    @torch.no_grad()
    def weight_pieces(
        self, state: Mapping[str, Any], stored: Mapping[str, str] | None = None
    ) -> tuple[list[Piece], dict[str, Any]]:
        """Return the tensors of this rank's state dict that a checkpoint stores, and other entries.

        Args:
            state: State dict of the module, with sharded tensors.
            stored: What `stored_names` gave; None: each name is that of the same weight.

        Raises:
            CheckpointError: A tensor is sharded in an unknown way.
        """
        named, values = dict[str, Tensor](), {}
        stored = self._canonical if stored is None else stored
        for name, value in state.items():
            if isinstance(value, Tensor):
                named.setdefault(stored.get(name, name), value)
            else:
                values[f"weights/{name}"] = value
        return _pieces(named), values

    def load_weights(
        self, module: nn.Module, state: Mapping[str, Any], *, strict: bool, place: str = ""
    ) -> None:
        """Load this rank's part of a whole state dict by the module's own `load_state_dict`.

        So its hooks, what it overrides and its extra state take part, as on one process. A tied
        weight needs one of its names only.

        Args:
            module: Its parameters are plain tensors or DTensors.
            state: Key -> whole tensor, on every rank; of `StoredTensors` this rank's part is read.
            strict: Refuse missing and unexpected keys.
            place: FQN of the submodule whose state it is.

        Raises:
            CheckpointError: On every rank, with the keys that do not fit.

        **Communicates**: what is wrong, to every rank.
        """
        prefix, part = f"{place}." if place else "", module.get_submodule(place)
        given = self._given_entries(state, prefix)
        alone = self._mesh.sizes.world_size == 1
        reads = _bytes_of_parts((t, given.get(n)) for n, t in named_tensors(part).items())
        with counted("read", "loading weights", reads):
            # strict on one device only: elsewhere keys of other stages are "unexpected" here.
            problems = _load_entries(part, given, strict=strict and alone)
        if strict and not alone:
            known = {*self._state_order, *self._canonical}  # other stages have the rest
            problems.unexpected = [n for n in problems.unexpected if f"{prefix}{n}" not in known]
            problems.other += [f"missing {name}" for name in problems.missing]
            problems.other += [f"unexpected {name}" for name in problems.unexpected]
        everywhere = [problems.other]
        if not alone:
            everywhere = [[]] * self._mesh.sizes.world_size
            # Reached by every rank, whatever it found: none may raise alone.
            dist.all_gather_object(everywhere, problems.other)
        found = list(dict.fromkeys(p for some in everywhere for p in some))
        if found:
            raise CheckpointError(
                "LP506",
                f"the checkpoint does not fit the model: {'; '.join(found)}. Build the model that "
                "was saved, or set strict_loading = False in the module to load what fits.",
            )

    def _given_entries(self, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return a state dict, of a module whose names begin so, of which no file is read yet."""
        given: Any = copy(state)  # with the versions of its modules
        if isinstance(state, StoredTensors):
            given = {
                n: UnreadTensor.of(e) if isinstance(e, StoredTensor) else e
                for n, e in state.unread().items()
            }
        # A file of safetensors has one name of a tied weight; of several torch loads the last one.
        for tied in self._tied.values():
            names = [name.removeprefix(prefix) for name in tied if name.startswith(prefix)]
            source = next((name for name in reversed(names) if name in given), None)
            if source is not None:
                given.update(dict.fromkeys(names, given[source]))
        return cast(dict[str, Any], given)

    @torch.no_grad()
    def copy_tensors(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of whole tensors into a module, whatever it overrides.

        Args:
            module: Module whose parameters are plain tensors or DTensors.
            tensors: FQN -> whole parameter or buffer, the same on every rank.
        """
        for name, target in named_tensors(module).items():
            value = tensors.get(name)
            # A buffer may stand for a parameter of another stage.
            same = isinstance(value, nn.Parameter) == isinstance(target, nn.Parameter)
            # A module that was made in the run, as a copy for a teacher, has one form only.
            if value is not None and same and value is not target:
                read_part(tensors[name], local_box(name, target), local_part(target))

    def match_names(self, module: nn.Module, state: StoredTensors) -> StoredTensors:
        """Return weights of a bare model under the names that the LightningModule gives them.

        Args:
            module: The model's part on this rank.
            state: Named from the LightningModule, or from one of its direct children, or as a
                Hugging Face model in it is saved.
        """
        state = adapt_weights(module, state, self._state_order)
        known = set(self._state_order)
        prefixes = {"", *(name.partition(".")[0] + "." for name in known)}
        hits = {prefix: sum(prefix + name in known for name in state) for prefix in prefixes}
        # Sorted: of prefixes that fit alike every rank takes the same.
        best = max(sorted(prefixes), key=hits.__getitem__)
        return state.renamed(best) if best else state

    @torch.no_grad()
    def local_optimizer(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the states and groups of an optimizer with names in place of parameters.

        Raises:
            CheckpointError: It holds what is no parameter of `module`.
        """
        names = self._names(module, optimizer)
        groups = [
            {**group, "params": [self._name(names, p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        states = {names[id(p)]: dict(optimizer.state[p]) for p in held if p in optimizer.state}
        shards = {names[id(p)] for p in held if isinstance(p, DTensor)}
        for name in shards & states.keys():
            for key, value in states[name].items():
                plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
                if plain and value.numel() > 1:
                    raise CheckpointError(
                        "LP505",
                        f"the optimizer's state {key} of {name} is a plain tensor of shape "
                        f"{tuple(value.shape)}, but the parameter is sharded, so which part of "
                        "the state this rank holds is not known. Create the state with "
                        "torch.zeros_like(parameter), or save with save_weights_only=True.",
                    )
        return {"state": states, "param_groups": groups}

    def names_in_groups(self, module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
        """Return the name of every parameter of each group; a tensor that is no parameter of
        `module` gets a number.
        """
        names, groups = self._names(module, optimizer), optimizer.param_groups
        return [
            [names.get(id(p), f"tensor {at} of group {i}") for at, p in enumerate(group["params"])]
            for i, group in enumerate(groups)
        ]

    @torch.no_grad()
    def optimizer_pieces(
        self, number: int, state: Mapping[str, Any]
    ) -> tuple[list[Piece], dict[str, Any]]:
        """Return the tensors of a `local_optimizer` that a checkpoint stores, and other entries.

        Args:
            number: Number of the optimizer.
            state: What `local_optimizer` gave.
        """
        flat = {
            f"{number}/{name}/{key}": value
            for name, entries in state["state"].items()
            for key, value in entries.items()
        }
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        rest = {f"optimizer/{n}": value for n, value in flat.items() if n not in tensors}
        return _pieces(tensors), rest

    def gather_optimizer(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict as one process would have it, on rank 0; elsewhere an
        empty dict.

        **Communicates**: all-gathers of every sharded tensor, then one gather over the pipeline
        stages.
        """
        return self.gather_local_optimizer(self.local_optimizer(module, optimizer))

    def gather_local_optimizer(self, local: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same as `gather_optimizer`, of what `local_optimizer` gave."""
        flat = _on_host({(n, k): v for n, held in local["state"].items() for k, v in held.items()})
        states: dict[str, dict[str, Any]] = {name: {} for name in local["state"]}
        for (name, key), value in flat.items():
            states[name][key] = value
        options = local["param_groups"]
        parts = self._gather_stages((states, [group["params"] for group in options]))
        if not parts:
            return {}
        merged = {name: held for part, _ in parts for name, held in part.items()}
        groups = zip(options, zip(*(names for _, names in parts), strict=True), strict=True)
        named = [{**g, "params": merge_names(members, self.place)} for g, members in groups]
        return torch_state(named, merged)

    @torch.no_grad()
    def load_optimizer(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        host: HostOptimizer | None = None,
    ) -> None:
        """Load this rank's part of a whole optimizer state.

        Args:
            module: Module whose parameters the optimizer holds.
            optimizer: Optimizer of this rank.
            state: As one process would have it, the same on every rank; of one in files only the
                part of this rank is read.
            host: Takes the states of parameters that are updated on the host.

        Raises:
            CheckpointError: Groups or parameters differ.

        **Communicates**: the names in every group, over the pipeline stages.
        """
        names = self._names(module, optimizer)
        groups = [[self._name(names, p) for p in g["params"]] for g in optimizer.param_groups]
        stages: list[Any] = [None] * self._mesh.sizes.pipeline
        if len(stages) > 1:
            dist.all_gather_object(stages, groups, group=self._mesh.group("pp"))
        else:
            stages = [groups]
        merged = [merge_names(parts, self.place) for parts in zip(*stages, strict=True)]
        stored = by_name(state, merged)
        check_groups(stored, merged)
        local_state, numbers = {}, count()
        # Local numbers: torch's `load_state_dict` goes by those of this rank's optimizer.
        ids = [[next(numbers) for _ in group["params"]] for group in optimizer.param_groups]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states, saved_groups = stored.states, stored.groups
        entries = [states.get(names[id(parameter)]) for parameter in held]
        pairs = zip(held, entries, strict=True)
        reads = _bytes_of_parts((p.data, v) for p, entry in pairs for v in (entry or {}).values())
        with counted("read", "loading the optimizer", reads):
            for position, (parameter, entry) in enumerate(zip(held, entries, strict=True)):
                if entry is not None and not _load_on_host(host, parameter, entry):
                    known = optimizer.state.get(parameter, {})
                    local_state[position] = {
                        k: state_like(parameter, v, known.get(k)) for k, v in entry.items()
                    }
        groups_of_ids = zip(saved_groups, ids, strict=True)
        local_groups = [{**saved, "params": members} for saved, members in groups_of_ids]
        optimizer.load_state_dict({"state": local_state, "param_groups": local_groups})
        if host is not None:
            host.show_states()

    def _names(self, module: nn.Module, optimizer: Optimizer) -> dict[int, str]:
        """Return id -> name of every parameter; on one device also of what is none."""
        named = module.named_parameters(remove_duplicate=False)
        known, given = self._canonical, self.given
        names = {id(p): known.get(n) or given.get(id(p), (n, p))[0] for n, p in named}
        if self._mesh.sizes.world_size == 1:
            for i, group in enumerate(optimizer.param_groups):
                for at, tensor in enumerate(group["params"]):
                    names.setdefault(id(tensor), f"tensor {at} of group {i}")
        return names

    def _name(self, names: Mapping[int, str], parameter: Tensor) -> str:
        if id(parameter) not in names:
            raise CheckpointError(
                "LP505",
                f"the optimizer holds a tensor of shape {tuple(parameter.shape)} that is no "
                "parameter of the module, so it has no name in a checkpoint. Assign it to an "
                "attribute of the LightningModule as an nn.Parameter.",
            )
        return names[id(parameter)]

    def _gather_stages(self, value: Any) -> list[Any]:
        """Return the values of all stages on rank 0, in order; elsewhere an empty list."""
        place = self._mesh.place
        # One rank per stage takes part: the first on every other axis.
        if any(at for axis, at in place.items() if axis != "pp"):
            return []
        if self._mesh.sizes.pipeline == 1:
            return [value]
        parts: list[Any] | None = [None] * self._mesh.sizes.pipeline if place["pp"] == 0 else None
        target = self._mesh.rank_at("pp", 0)
        dist.gather_object(value, parts, dst=target, group=self._mesh.group("pp"))
        return parts or []


def _on_host(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the same with every tensor whole and on the CPU."""
    found = full_tensors(v for v in values.values() if isinstance(v, Tensor))
    return {k: next(found).cpu() if isinstance(v, Tensor) else v for k, v in values.items()}


def _pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    pieces: Iterator[Piece] = (cut_piece(name, tensor) for name, tensor in tensors.items())
    return [piece for piece in pieces if not piece.is_shard_of_nothing]


def _bytes_of_parts(pairs: Iterable[tuple[Tensor, Any]]) -> int:
    """Return how many bytes are read of files for these: what a rank holds, and what is stored."""
    found = 0
    for target, entry in pairs:
        stored = entry.source if isinstance(entry, UnreadTensor) else entry
        if isinstance(stored, StoredTensor):
            is_part = stored.shape == target.shape
            size = local_part(target).numel() * stored.dtype.itemsize
            found += size if is_part else stored.nbytes
    return found


def _load_on_host(
    host: HostOptimizer | None, parameter: nn.Parameter, entry: Mapping[str, Any]
) -> bool:
    """Load the states of a parameter that is updated on the host; return whether it is."""

    def read(value: Any, out: Tensor) -> None:
        read_part(value, local_box("state", parameter.data), out)

    return host is not None and host.load(parameter, entry, read)


@dataclass
class _Problems:
    """Keys that did not fit where a module has loaded a state dict, and other problems."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def _load_entries(module: nn.Module, given: dict[str, Any], *, strict: bool) -> _Problems:
    """Call a module's `load_state_dict`; whole tensors for shards are cut on the way."""
    problems = _Problems()

    def cut(part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, target in named_tensors(part, recurse=False).items():
            value = state.get(prefix + name)
            is_whole = type(value) in (Tensor, nn.Parameter)
            if isinstance(target, DTensor) and value is not None and is_whole:
                state[prefix + name] = UnreadTensor.of(value)
        extra = state.get(f"{prefix}_extra_state")
        if isinstance(extra, UnreadTensor):
            state[f"{prefix}_extra_state"] = extra.read()

    def note(_: nn.Module, keys: Any) -> None:
        problems.missing, problems.unexpected = list(keys.missing_keys), list(keys.unexpected_keys)

    # Added last, so that they see what the user's own hooks leave.
    handles = [part.register_load_state_dict_pre_hook(cut) for part in module.modules()]
    handles.append(module.register_load_state_dict_post_hook(note))
    try:
        module.load_state_dict(given, strict=strict)
    except RuntimeError as error:  # torch's text has a line for each problem below the first
        problems.other = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    finally:
        for handle in handles:
            handle.remove()
    return problems


def named_tensors(module: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return FQN -> parameter or buffer under all of its names, also buffers that are not saved.

    Args:
        module: Any module.
        recurse: Also those of its submodules.
    """
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    buffers = module.named_buffers(recurse=recurse, remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def state_like(parameter: nn.Parameter, value: Any, held: Any = None) -> Any:
    """Return this rank's part of an optimizer state, sharded like its parameter if it has the same
    shape.

    It is read into the tensor that is held already, if that fits, so that memory never has both.
    """
    if not isinstance(value, Tensor | StoredTensor):
        return value
    data = parameter.data
    same = value.shape == data.shape and data.ndim > 0
    # A state that is in parts already was made of the parameter on this mesh.
    if not isinstance(data, DTensor) or not same or isinstance(value, DTensor):
        return value.read() if isinstance(value, StoredTensor) else value
    box = local_box("state", data)
    fits = isinstance(held, DTensor) and held.placements == data.placements
    if fits and held.dtype == value.dtype:
        read_part(value, box, held.to_local())
        return held
    local = torch.empty_like(data.to_local(), dtype=value.dtype)
    read_part(value, box, local)
    return DTensor.from_local(
        local,
        data.device_mesh,
        data.placements,
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
