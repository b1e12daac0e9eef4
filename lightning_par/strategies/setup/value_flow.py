"""Where values go in the source code of functions, from the expression that reads them."""

import ast
import linecache
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

__all__ = ["Place", "attributes_made_of", "places_of"]

_Mark = tuple[int, int]
"""Line and column."""
Place = tuple[CodeType, tuple[_Mark, _Mark]]
"""Code of a function, and where an expression in it begins and ends."""


def places_of(frame: FrameType | None) -> list[Place]:
    """Return the expression that a frame computes, and then those of its callers."""
    found: list[Place] = []
    while frame is not None:
        code, here = frame.f_code, frame.f_lineno
        line, end, column, last = list(code.co_positions())[frame.f_lasti // 2]
        # Without columns, as by `python -X no_debug_ranges`, it is one at the end of the line.
        found.append((code, ((line or here, column or 0), (end or here, last or 0))))
        frame = frame.f_back
    return found


def attributes_made_of(reads: Iterable[Sequence[Place]], files: Iterable[str]) -> set[str]:
    """Return the names of attributes, and keys, whose values are computed from what was read.

    No code runs: values are followed in the source, over assignments, arguments and results of
    functions, and branches. The order of lines is not considered.

    Args:
        reads: The expression of each read, and those of its callers.
        files: Names of more files, whose functions may use these attributes.
    """
    flow = _Flow()
    for file in files:
        flow.read(file)
    size = -1
    while flow.size() > size:  # a function may use what a later one sets
        size = flow.size()
        for stack in reads:
            for place in stack:
                if not flow.reaches_result(*place):
                    break
        flow.follow_all()
    return flow.attributes | flow.results


_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Flow:
    """Values that are followed in some files.

    Attributes:
        attributes: Names of attributes, and keys, that have such a value.
        results: Names of functions whose result is computed from such values.
    """

    def __init__(self) -> None:
        self._files: dict[str, list[_Function]] = {}
        self._functions: dict[str, list[_Function]] = {}
        self._names = defaultdict[_Function, set[str]](set)
        self._reads = defaultdict[_Function, set[tuple[_Mark, _Mark]]](set)
        self.attributes, self.results = set[str](), set[str]()

    def size(self) -> int:
        """Return how many names and reads were found so far."""
        inside: list[set[Any]] = [*self._names.values(), *self._reads.values()]
        return sum(len(found) for found in [self.attributes, self.results, *inside])

    def read(self, file: str) -> list[_Function]:
        """Return the functions of a file; empty without its source."""
        if file not in self._files:
            try:
                tree = ast.parse("".join(linecache.getlines(file)))
            except SyntaxError:
                tree = ast.Module([], [])
            found = self._files[file] = [n for n in ast.walk(tree) if isinstance(n, _Function)]
            for function in found:
                self._functions.setdefault(function.name, []).append(function)
        return self._files[file]

    def reaches_result(self, code: CodeType, read: tuple[_Mark, _Mark]) -> bool:
        """Follow what a function reads in an expression; return whether its result has it."""
        for function in self.read(code.co_filename):
            first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
            if (function.name, first) == (code.co_name, code.co_firstlineno):
                self._reads[function].add(read)
                self._follow(function)
                return function.name in self.results
        return code.co_name.startswith("<")  # a lambda or comprehension, inside of a line

    def follow_all(self) -> None:
        """Follow values in each function."""
        for functions in list(self._files.values()):
            for function in functions:
                self._follow(function)

    def _follow(self, function: _Function) -> None:
        for value, targets in _bindings(function):
            if self._has(value, function):
                for target in targets:
                    self._bind(target, function)
                if not targets:
                    self.results.add(function.name)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                self._pass_on(node, function)

    def _has(self, value: ast.AST, function: _Function) -> bool:
        names = self._names[function] | self.results
        attributes, reads = self.attributes | self.results, self._reads[function]
        return any(
            (isinstance(node, ast.Name) and node.id in names)
            or (isinstance(node, ast.Attribute) and node.attr in attributes)
            or not attributes.isdisjoint(_keys(node))
            or (isinstance(node, ast.expr) and any(_holds(node, read) for read in reads))
            for node in ast.walk(value)
        )

    def _bind(self, target: ast.AST, function: _Function) -> None:
        if isinstance(target, ast.Name):
            self._names[function].add(target.id)
        elif isinstance(target, ast.Attribute):
            self.attributes.add(target.attr)
        elif isinstance(target, ast.Constant):
            self.attributes.add(str(target.value))
        elif isinstance(target, ast.Subscript):
            # One entry has the value, and all of what holds it if the entry has no name.
            key = isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)
            self._bind(target.slice if key else target.value, function)
        else:
            for part in ast.iter_child_nodes(target):
                self._bind(part, function)

    def _pass_on(self, call: ast.Call, function: _Function) -> None:
        """Follow the arguments of a call into the function that is called."""
        called = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if called == "setattr" and len(call.args) == 3 and self._has(call.args[2], function):
            self._bind(call.args[1], function)
        for other in self._functions.get(called, ()):
            given = [arg.arg for arg in (*other.args.args, *other.args.kwonlyargs)]
            given = given[given[:1] == ["self"] :]
            pairs = [*zip(given, call.args, strict=False)]
            pairs += [(word.arg or "", word.value) for word in call.keywords]
            self._names[other] |= {name for name, value in pairs if self._has(value, function)}


def _keys(node: ast.AST) -> Iterator[str]:
    """Yield the constant keys by which an expression reads something, as of `get` or `getattr`."""
    found = [node.slice] if isinstance(node, ast.Subscript) else getattr(node, "args", [])
    if isinstance(found, list):
        yield from (str(key.value) for key in found if isinstance(key, ast.Constant))


def _holds(node: ast.expr, read: tuple[_Mark, _Mark]) -> bool:
    end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return (node.lineno, node.col_offset) <= read[0] and read[1] <= end


def _bindings(function: ast.AST) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Yield each value in a function, and what gets it; nothing for a result of the function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((value, [part]) for value, part in _pairs(node.value, target))
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
            if node.value is not None:
                yield node.value, [node.target]
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.iter, [node.target]
        elif isinstance(node, ast.If | ast.While):
            for branch in (*node.body, *node.orelse):
                for _, targets in _bindings(branch):
                    yield node.test, targets
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.context_expr, [node.optional_vars]
        elif isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            yield node.value, []


def _pairs(value: ast.AST, target: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Return what each of several targets gets, if they get one each, as in ``a, b = 1, 2``."""
    parts = getattr(target, "elts", []), getattr(value, "elts", [])
    alone = not any(isinstance(each, ast.Starred) for part in parts for each in part)
    if isinstance(value, ast.Tuple) and alone and len(parts[0]) == len(parts[1]):
        return list(zip(parts[1], parts[0], strict=True))
    return [(value, target)]
