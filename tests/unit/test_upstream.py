"""Private names of other packages: used in lightning_par/upstream only, few, and missed aloud."""

import ast
import functools
import importlib.metadata
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

import lightning_par
from lightning_par import upstream
from lightning_par.errors import UpstreamError
from lightning_par.upstream import fsdp
from lightning_par.upstream.presence import SEEN

PACKAGE = Path(lightning_par.__file__).parent
UPSTREAM = PACKAGE / "upstream"
MOST = 69
OPTIONAL = {"_is_expert_parallel"}
"""Set where a module has it; one without it has no kernel that asks."""
UNCOUNTED = ("torch.utils._pytree.", "torch.utils._python_dispatch.TorchDispatchMode")
"""Not counted: names without an underscore, which torch's notes tell to use, or which Lightning,
transformers and torchao import.
"""
PACKAGES = {
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
    "transformers",
}
CONVENTIONAL = MappingProxyType(
    {
        "_abc_impl": "every abstract class has it",
        "_apply": "overridden by every module that refuses a change of device",
        "_backward_cls": "every autograd.Function has it",
        "_backward_hooks": "what Tensor.register_hook and nn.Module register",
        "_backward_pre_hooks": "what nn.Module registers",
        "_buffers": "what nn.Module registers, without the walk of named_buffers()",
        "_current_frames": "Python documents sys._current_frames",
        "_exit": "Python documents os._exit",
        "_fields": "Python documents it of namedtuples",
        "_flash_attn_backward": "of flash-attn; FlashAttnKernel.missing looks for it",
        "_flash_attn_bwd": "of flash-attn-4; FlashAttn4Kernel.missing looks for it",
        "_flash_attn_forward": "of flash-attn; FlashAttnKernel.missing looks for it",
        "_flash_attn_fwd": "of flash-attn-4; FlashAttn4Kernel.missing looks for it",
        "_forward_hooks": "what nn.Module registers",
        "_forward_pre_hooks": "what nn.Module registers",
        "_getframe": "Python documents sys._getframe",
        "_modules": "what nn.Module registers, without the walk of named_modules()",
        "_parameters": "what nn.Module registers, without the walk of named_parameters()",
        "_post_accumulate_grad_hooks": "what the method of this name of a Tensor registers",
    }
)


def is_private(name: str) -> bool:
    ours = name.startswith("_lightning_par_")  # on objects of others
    return name.startswith("_") and name != "_" and not name.endswith("__") and not ours


def own_names(trees: list[ast.AST]) -> set[str]:
    """Give the private names that these modules define, on themselves or on their instances."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            place = ast.unparse(node.value)
            if place in ("self", "cls"):
                found.add(node.attr)
            elif place == "self.__dict__":
                found |= set(spelled(node))
    return {name for name in found if is_private(name)}


def imported(node: ast.AST) -> list[str]:
    """Give what a statement imports from `PACKAGES` by a private name or a private module."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [(name, name.split(".")) for name in names]
    return [name for name, p in parts if p[0] in PACKAGES and any(map(is_private, p))]


def chains(tree: ast.AST) -> Iterator[tuple[ast.AST, list[str]]]:
    """Give every ``a.b.c`` whole, as its names; of a call or a subscript what follows it."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names, at = [], node
            while isinstance(at, ast.Attribute):
                names.append(at.attr)
                at = at.value
            yield node, [at.id if isinstance(at, ast.Name) else "", *names[::-1]]


def spelled(node: ast.AST) -> list[str]:
    """Give names of attributes that a call of getattr and the like, or vars(), spells out."""
    given: list[ast.expr] = []
    if isinstance(node, ast.Call):
        asked = node.func.id if isinstance(node.func, ast.Name) else ""
        given = node.args[1:2] if asked in ("delattr", "getattr", "hasattr", "setattr") else []
    elif isinstance(node, ast.Subscript):
        place = ast.unparse(node.value)
        given = [node.slice] if place.endswith("__dict__") or place.startswith("vars(") else []
    names = [n.value for n in given if isinstance(n, ast.Constant)]
    return [name for name in names if isinstance(name, str)]


def private_uses(tree: ast.AST, own: set[str]) -> list[tuple[int, str]]:
    """Give line and name of every use of a private name of another package.

    Args:
        tree: Of a module.
        own: Private names that belong to us wherever they stand, unless in one of `PACKAGES`.
    """
    known = own | set(CONVENTIONAL)
    found = [(n.lineno, name) for n in ast.walk(tree) for name in imported(n)]
    for node, (root, *names) in chains(tree):
        allowed = set(CONVENTIONAL) if root in PACKAGES else known
        first = next((i for i, n in enumerate(names) if is_private(n) and n not in allowed), None)
        if first is not None:
            found.append((node.lineno, ".".join(names[first:])))
    for node in ast.walk(tree):
        names = [n for n in spelled(node) if is_private(n) and n not in known]
        found += [(node.lineno, name) for name in names]
    return found


def parsed(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def guards(tree: ast.AST) -> list[ast.With]:
    """Give the ``with names_of(...)`` blocks."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    return [b for b in blocks if ast.unparse(b.items[0]).startswith("names_of(")]


def upstream_uses() -> dict[str, set[str]]:
    """Give the names that each module of upstream uses; its own underscored aliases are not."""
    found = {}
    for path, tree in parsed(UPSTREAM).items():
        found[path.stem] = {name for _, name in private_uses(tree, set())}
    return found


def test_private_names_are_used_in_upstream_only() -> None:
    trees = {p: t for p, t in parsed(PACKAGE).items() if UPSTREAM not in p.parents}
    own = own_names(list(trees.values()))
    problems = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_uses(tree, own)
    ]
    assert not problems, "belongs in lightning_par/upstream:\n" + "\n".join(problems)


def test_few_private_names_are_left() -> None:
    uses = [(module, name) for module, names in upstream_uses().items() for name in names]
    held = sorted(f"{module}: {name}" for module, name in uses if not name.startswith(UNCOUNTED))
    assert 0 < len(held) <= MOST, f"{len(held)} names:\n" + "\n".join(held)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("from lightning.fabric import _set", ["lightning.fabric._set"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("def f():\n    return torch._C.Key.Lazy", ["_C.Key.Lazy"]),
        ("torch._own(x)", ["_own"]),  # of torch, whatever we call our own
        ("self._inherited()", ["_inherited"]),
        ("f(x)._state().open._now()", ["_now", "_state"]),
        ('getattr(module, "_secret", None)', ["_secret"]),
        ('metric.__dict__["_cache"] = 1', ["_cache"]),
        ("self._own; module._parameters; x.__dict__; point._fields; _", []),
        ('getattr(self, "_own"); vars(x)["name"]; table["_row"]', []),
        ("from lightning_par.engine import _ours", []),
        ("import torch.nn.functional as F", []),
    ],
)
def test_the_search_finds(text: str, names: list[str]) -> None:
    assert sorted(n for _, n in private_uses(ast.parse(text), {"_own"})) == sorted(names)


def test_own_names_are_those_that_are_defined() -> None:
    text = (
        "_TABLE = 1\nclass _A:\n    _field: int\n    def _f(self):\n        self._x = other._y = 1"
    )
    assert own_names([ast.parse(text)]) == {"_TABLE", "_A", "_field", "_f", "_x"}


@functools.cache
def source(kind: type) -> str:
    """Give the text of a class, for which Python parses all of its file."""
    return inspect.getsource(kind)


def upstream_defines(kind: type, name: str) -> bool:
    """Whether a base of `kind` from `PACKAGES` has `name`, on the class or set by its methods."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in PACKAGES:
            text = source(base)
            if name in vars(base) or f"self.{name} =" in text or f"self.{name}:" in text:
                return True
    return False


def classes() -> Iterator[type]:
    """Give every class of lightning_par that derives from one of another package."""
    for info in pkgutil.walk_packages(lightning_par.__path__, "lightning_par."):
        for kind in vars(importlib.import_module(info.name)).values():
            is_ours = inspect.isclass(kind) and kind.__module__ == info.name
            if is_ours and {b.__module__.partition(".")[0] for b in kind.__mro__} & PACKAGES:
                yield kind


def test_private_names_of_a_base_are_overridden_only_where_upstream_looks_for_them() -> None:
    looked_for = {name.partition(".")[0] for names in upstream_uses().values() for name in names}
    problems = []
    for kind in classes():
        tree = ast.parse(textwrap.dedent(source(kind)))
        private = {n for n in vars(kind) if is_private(n) and n not in CONVENTIONAL} - looked_for
        private |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
            if is_private(node.attr) and node.attr not in CONVENTIONAL
        }
        where = f"{kind.__module__}.{kind.__name__}"
        problems += [f"{where}: {n}" for n in sorted(private) if upstream_defines(kind, n)]
    assert not problems, "\n".join(problems)


def guarded(path: Path) -> list[str]:
    """Give the names that a module looks up while it is imported, where a missing one is told."""
    tree = ast.parse(path.read_text())
    blocks = [b for b in guards(tree) if b in tree.body]
    return sorted({name for b in blocks for _, name in private_uses(b, set())})


GUARDED = [(path.stem, name) for path in sorted(UPSTREAM.glob("*.py")) for name in guarded(path)]


class WithoutName(ast.NodeTransformer):
    """Renames a private name, so that what is looked up does not exist."""

    def __init__(self, name: str) -> None:
        self.name = name.rpartition(".")[2] if "._" in name[1:] or name[0] != "_" else ""
        self.name = self.name or next(n for n in name.split(".") if n != "_C")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr += "_gone" if node.attr == self.name else ""
        return node

    def visit_alias(self, node: ast.alias) -> ast.AST:
        node.name += "_gone" if node.name == self.name else ""
        return node


@pytest.mark.parametrize(("module", "name"), GUARDED)
def test_import_tells_of_a_missing_name(module: str, name: str) -> None:
    tree = ast.parse((UPSTREAM / f"{module}.py").read_text())
    lacking = WithoutName(name)
    code = compile(ast.fix_missing_locations(lacking.visit(tree)), module, "exec")
    with pytest.raises(UpstreamError, match=f"{lacking.name}_gone.*tested with .* Inst") as caught:
        exec(code, {"__name__": "planted"})
    assert any(seen in str(caught.value) for seen in SEEN.values())


def test_import_tells_of_a_deleted_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.distributed_c10d._set_pg_timeout")
    text = (UPSTREAM / "distributed.py").read_text()
    version = re.escape(importlib.metadata.version("torch"))
    expected = f"missing from torch {version}: .*_set_pg_timeout.*torch 2.11 and 2.13"
    with pytest.raises(UpstreamError, match=expected):
        exec(text, {"__name__": "planted"})


class Lacking:
    """Has every public attribute and no private one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"no attribute {name!r}")
        return Lacking()


def asking(module: ModuleType) -> list[tuple[str, str]]:
    """Give the functions of a module that look names up when they are called, and the first one."""
    tree = ast.parse(inspect.getsource(module))
    found = [(f.name, guards(f)) for f in tree.body if isinstance(f, ast.FunctionDef)]
    return [(f, private_uses(b[0], set())[0][1].partition(".")[0]) for f, b in found if b]


MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.iter_modules(upstream.__path__, "lightning_par.upstream.")
]
ASKING = [(module, *found) for module in MODULES for found in asking(module)]


@pytest.mark.parametrize(("module", "function", "name"), ASKING, ids=lambda value: str(value)[:40])
def test_call_tells_of_a_missing_name(
    module: ModuleType, function: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "_get_state", lambda root: Lacking())
    called = getattr(module, function)
    lacking = object.__new__(DDPStrategy) if "batchnorm" in function else Lacking()
    arguments = [lacking for _ in inspect.signature(called).parameters]
    with pytest.raises(UpstreamError, match=f"{name}.*tested with"):
        called(*arguments)


def test_every_name_is_looked_up_where_a_missing_one_is_told() -> None:
    for path, tree in parsed(UPSTREAM).items():
        told = {name for block in guards(tree) for _, name in private_uses(block, set())}
        assert {name for _, name in private_uses(tree, set())} <= told | OPTIONAL, path
