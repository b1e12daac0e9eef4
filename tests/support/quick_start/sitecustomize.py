"""Shortens the start of every Python whose path has this folder, if it imports Lightning.

Lightning imports torchmetrics, which imports transformers and matplotlib wherever they are
installed: a third of the seconds until a script begins. It is told here that they are not. Whoever
imports one of them by its name gets it.
"""

import sys
from importlib.machinery import PathFinder

_KNOWS = "torchmetrics.utilities.imports"
_LARGE = ("_TRANSFORMERS_", "_MATPLOTLIB_")


class _Finder:
    """Finds the module in which torchmetrics notes what is installed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != _KNOWS:
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_forget(module):
            run(module)
            held = vars(module)
            held.update({flag: False for flag in held if flag.startswith(_LARGE)})

        spec.loader.exec_module = run_and_forget
        return spec


sys.meta_path.insert(0, _Finder)
