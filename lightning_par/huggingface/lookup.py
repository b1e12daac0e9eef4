"""Finding the Hugging Face model inside a module, and writing down which one it is."""

import copy
import json
import sys
from typing import Any

from torch import nn

__all__ = ["describe_model", "find_model"]


def find_model(module: nn.Module) -> tuple[str, Any] | None:
    """Return the FQN and the outermost Hugging Face model inside `module`.

    Args:
        module: A LightningModule or any other module; parameters may be on meta.

    Returns:
        None if there is no such model, or several beside each other. The FQN is empty if `module`
        is the model.
    """
    # Importing it takes seconds.
    if "transformers.modeling_utils" not in sys.modules:  # then nobody can have made one
        return None
    from transformers import PreTrainedModel

    found: dict[str, Any] = {}
    for name, child in module.named_modules():
        # `named_modules` gives outer modules first.
        inside = any(name.startswith(outer + ".") or outer == "" for outer in found)
        if isinstance(child, PreTrainedModel) and not inside:
            found[name] = child
    return next(iter(found.items())) if len(found) == 1 else None


def describe_model(module: nn.Module) -> dict[str, str] | None:
    """Return what an export needs in order to build the Hugging Face model inside `module` again.

    Args:
        module: A LightningModule; it may hold a part of the model only.

    Returns:
        Its FQN (``"prefix"``) and its configuration (``"config"``, JSON), or None if there is no
        such model.
    """
    found = find_model(module)
    if found is None:
        return None
    prefix, model = found
    # A copy: `architectures` is set, which the user's own may lack.
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    return {"prefix": prefix, "config": json.dumps(json.loads(config.to_json_string()))}
