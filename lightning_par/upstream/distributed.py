"""Process groups and functional collectives of torch.distributed.

`functional_operators` holds the collectives as operators, which autograd, DTensor and the compiler
see. `torch.distributed` has them in place only, and `torch.distributed._functional_collectives`,
which calls them, is private too.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
        _get_default_store,
        _resolve_process_group,
        _set_pg_timeout,
    )

    functional_operators = torch.ops._c10d_functional
    # Any namespace exists; its operators may not.
    _CHECKED = (
        functional_operators.all_gather_into_tensor,
        functional_operators.all_reduce,
        functional_operators.all_to_all_single,
        functional_operators.reduce_scatter_tensor,
        functional_operators.wait_tensor,
    )

__all__ = [
    "default_store",
    "functional_operators",
    "group_named",
    "set_timeout",
    "use_symmetric_memory",
]


def default_store() -> Any:
    """Return the store through which the ranks of the world met.

    `init_process_group` makes it unless it is given one; nothing public returns it.
    """
    return _get_default_store()


def group_named(name: Any) -> dist.ProcessGroup:
    """Return the process group of a name, which is how functional operators are told of theirs.

    Args:
        name: `ProcessGroup.group_name`.
    """
    group: dist.ProcessGroup = _resolve_process_group(name)
    return group


def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set after which time a collective of a group gives up.

    `init_device_mesh` takes no timeout, and that of `init_process_group` is too late for a world
    that somebody else has made.

    Args:
        group: None: that of the world.
        timeout: For every backend of the group.
    """
    _set_pg_timeout(timeout, group)


def use_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Let compiled code copy between the memories of the devices of a group.

    The compiler fuses collectives only of groups that were named so; nothing public does it.

    Args:
        group: Of ranks whose devices reach each other's memory.
    """
    enable_symm_mem_for_group(group.group_name)
