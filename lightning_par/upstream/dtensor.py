"""DTensors that the public constructors would not make, and their nodes in autograd's graph."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    from torch.distributed.tensor._api import _ToTorchTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["TO_LOCAL_NODE", "sharded_like"]

TO_LOCAL_NODE = f"{_ToTorchTensor.__name__}Backward"
"""Name of the node that `DTensor.to_local` leaves in the graph; a node shows only its name."""


def sharded_like(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of this rank's part, on whichever device that is.

    `DTensor.from_local` would move it to the device of the mesh.

    Args:
        local: This rank's part, sharded as `like` is.
        like: Gives mesh, placements, shape and strides.
    """
    # dtype of the part, which may differ from that of `like` (a master copy).
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)
