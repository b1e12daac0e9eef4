"""In which order a model runs its lists of blocks and what is around them, read from its source.

Many models define a final norm before the list of blocks, or an embedding norm behind it; the order
in which the forward names them is the one that counts.
"""

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast, NamedTuple

from torch import nn

__all__ = ["UseOrder", "uses_of"]

_DEPTH = 5  # of methods that call methods of the same object


class UseOrder:
    """Finds where every module outside the blocks is used, among the lists of blocks.

    Args:
        model: Parameters may be on meta.
        containers: FQNs of its lists of blocks, in the order of their definition.

    Attributes:
        containers: The same in the order in which they run; as given, if that is not seen.
        spans: FQN of a module or direct parameter -> how many containers have run before its first
            use, and before its last. Only what a forward on the way to the blocks names is here.
    """

    def __init__(self, model: nn.Module, containers: Sequence[str]) -> None:
        self._order: list[str] = []
        # Those that have not run yet, where the walk is.
        self._ahead = list(containers)
        self.spans: dict[str, tuple[int, int]] = {}
        self._walk(model, "")
        # A container that the walk has not met makes every count wrong, so none is given.
        complete = not self._ahead
        self.containers = tuple(self._order) if complete else tuple(containers)
        self.spans = self._with_parents() if complete else {}

    def _walk(self, module: nn.Module, prefix: str) -> None:
        """Pass through the uses in a module on the way to the blocks; note where each stands."""
        for use in uses_of(cast(Any, type(module))):
            found = self._resolve(module, prefix, use.chain)
            if found is None:
                continue
            fqn, used = found
            inside = [c for c in self._ahead if _is_in(c, fqn)]
            # A list of lists runs all of those inside of it.
            if fqn in self._ahead or isinstance(used, nn.ModuleList):
                self._order += inside
                self._ahead = [c for c in self._ahead if c not in inside]
            elif inside and isinstance(used, nn.Module):
                self._walk(used, fqn + ".")
            # A use that is not on the way to blocks, nor of a block: what the spans are about.
            if not inside and not any(_is_in(fqn, c) or _is_in(c, fqn) for c in self._order):
                loops = (self._resolve(module, prefix, chain) for chain in use.loops)
                around = [loop[0] for loop in loops if loop is not None]
                now = len(self._order)
                # In a loop over a container: some of it runs before the container has ended.
                before = now - sum(any(_is_in(c, a) for a in around) for c in self._order)
                low, high = self.spans.get(fqn, (before, now))
                self.spans[fqn] = min(low, before), max(high, now)

    def _resolve(
        self, module: nn.Module, prefix: str, chain: tuple[str, ...]
    ) -> tuple[str, object] | None:
        """Return what the longest part of a chain names, that is a module or a parameter."""
        names: list[str] = []
        found: object = None
        for name in chain:
            # As `Module.__getattr__` finds them; instance attributes are no modules.
            parts: Mapping[str, object] = {**module._parameters, **module._modules}
            if parts.get(name) is None:
                break
            names.append(name)
            found = parts[name]
            # Not into blocks, whose own parts are of no concern.
            if not isinstance(found, nn.Module) or prefix + ".".join(names) in self._ahead:
                break
            module = found
        return (prefix + ".".join(names), found) if names else None

    def _with_parents(self) -> dict[str, tuple[int, int]]:
        """A part of a module is also used where the whole is."""
        joined = {}
        for fqn in self.spans:
            spans = [span for f, span in self.spans.items() if _is_in(fqn, f)]
            joined[fqn] = min(low for low, _ in spans), max(high for _, high in spans)
        return joined


def _is_in(fqn: str, outer: str) -> bool:
    return f"{fqn}.".startswith(outer + ".")


class _Use(NamedTuple):
    """A chain of attributes of self, such as ("encoder", "layers"); those that loops around run
    through.
    """

    chain: tuple[str, ...]
    loops: tuple[tuple[str, ...], ...]


def _calls_its_target(loop: ast.For) -> bool:
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    nodes = (node for part in loop.body for node in ast.walk(part))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id in targets for called in calls)


@cache
def uses_of(kind: Any) -> tuple[_Use, ...]:
    """Return the attributes of self that the forward of a class of modules uses, in order."""
    return tuple(_Reader(kind).read("forward"))


class _Reader:
    """Reads the uses of attributes of self off the source of a method, in the order of running."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._loops: list[tuple[str, ...]] = []
        self._inside: list[str] = []

    def read(self, method: str) -> Iterator[_Use]:
        """Yield the uses in a method, and in the methods of the same object that it calls."""
        # A method that calls itself would be read for ever.
        if method in self._inside or len(self._inside) > _DEPTH:
            return
        # static: a property would be called on the class.
        function = inspect.getattr_static(self._kind, method, None)
        function = getattr(function, "fget", function)
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(cast(Any, function))))
            (tree,) = ast.parse(source).body
        except (OSError, SyntaxError, TypeError, ValueError):
            return
        self._inside.append(method)
        if isinstance(tree, ast.FunctionDef):
            yield from self._visit_all(tree.body)
        self._inside.pop()

    def _visit_all(self, nodes: Collection[ast.AST]) -> Iterator[_Use]:
        for node in nodes:
            yield from self._visit(node)

    def _visit(self, node: ast.AST) -> Iterator[_Use]:
        # In the order in which Python evaluates, not in that of the text: arguments before the
        # call, the value before the target.
        chain = self._chain(node)
        if chain is not None:
            yield from self._use(chain)
        elif isinstance(node, ast.For) and _calls_its_target(node):
            chains = (self._chain(inner) for inner in ast.walk(node.iter))
            around = [chain for chain in chains if chain is not None]
            self._loops += around
            # Twice what is zipped with blocks, since some of it runs between two of them.
            yield from self._visit_all([node.iter, *node.body, node.iter])
            del self._loops[len(self._loops) - len(around) :]
        elif isinstance(node, ast.For):  # as one that changes weights in place: nothing runs
            yield from self._visit_all(node.body)
        elif isinstance(node, ast.Assign):
            yield from self._visit(node.value)
            yield from self._visit_all(node.targets)
        elif isinstance(node, ast.Call):
            yield from self._visit_all([*node.args, *node.keywords])
            yield from self._visit(node.func)
        else:
            yield from self._visit_all([*ast.iter_child_nodes(node)])

    def _use(self, chain: tuple[str, ...]) -> Iterator[_Use]:
        known = inspect.getattr_static(self._kind, chain[0], None)
        if isinstance(known, property) or inspect.isroutine(known):
            yield from self.read(chain[0])
        else:
            yield _Use(chain, tuple(self._loops))

    def _chain(self, node: ast.AST) -> tuple[str, ...] | None:
        """Return ("a", "b") for ``self.a.b``, and what ``getattr(self, ...)`` means."""
        names: list[str] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
            # `self.layers[0].norm` names a part of an entry, which is not known here.
            elif names:
                return None
            node = node.value
        if isinstance(node, ast.Name) and node.id == "self":
            return tuple(names) or None
        # `getattr(self, "encoder")`, or with the name in an attribute of the class.
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), what, *_]):
                return self._named(what)
        return None

    def _named(self, what: ast.AST) -> tuple[str, ...] | None:
        match what:
            case ast.Constant(value=str(name)):
                return (name,)
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                value = getattr(self._kind, attribute, None)  # such as base_model_prefix
                return (value,) if isinstance(value, str) else None
        return None
