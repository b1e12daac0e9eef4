"""Run a training step without a trace, and watch what it calls.

`isolated` runs a step and leaves nothing of it behind, `watch` gives a `Watcher` the functions,
operators and modules that are called. Both take any module, on one device and on each rank of a
mesh.
"""

from typing import Any, TYPE_CHECKING

__all__ = ["FunctionCall", "ModuleCall", "OperatorCall", "Watcher", "isolated", "watch"]

if TYPE_CHECKING:
    from lightning_par.observe.isolate import isolated
    from lightning_par.observe.watchers import (
        FunctionCall,
        ModuleCall,
        OperatorCall,
        watch,
        Watcher,
    )
else:

    def __getattr__(name: str) -> Any:
        """Import it when it is asked for (PEP 562): the engine has to work without Lightning."""
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "isolate" if name == "isolated" else "watchers"
        return getattr(import_module(f"{__name__}.{home}"), name)
