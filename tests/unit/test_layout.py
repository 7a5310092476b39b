"""The module reads top to bottom: pure sections first, and no section uses a later one."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[2] / "shardbox.py"
SOURCE = MODULE.read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)

SECTIONS = {
    1: "Errors",
    2: "Units",
    3: "Configuration",
    4: "Inventory",
    5: "Plan",
    6: "Wiring",
    7: "Lifecycle",
    8: "Probes",
    9: "Survey",
    10: "Discovery",
    11: "Mesh",
    12: "Files",
    13: "Engine",
    14: "Rehearsal",
    15: "Peers",
    16: "Ranks",
    17: "Rings",
    18: "Node",
    19: "Endpoint",
    20: "Control",
    21: "Status",
    22: "Running",
    23: "Commands",
    24: "Program",
}
PURE = (1, 2, 3, 4, 5, 6, 7, 21)
IO_MODULES = frozenset({"asyncio", "os", "time", "socket", "subprocess", "zeroconf", "aiohttp", "click"})
IO_MORE = frozenset({"web", "http", "logging", "fcntl", "random", "secrets", "select", "signal", "sys", "threading"})
ALLOWED: frozenset[tuple[str, str]] = frozenset()  # (user, used): references down the file, each with its reason

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def headers() -> dict[int, int]:
    """The line of each numbered header: `# 5. Plan: ...` between two rules."""
    found = re.finditer(r"(?m)^# =+\n# (\d+)\. (.+)\n# =+$", SOURCE)
    return {int(match[1]): SOURCE.count("\n", 0, match.start()) + 1 for match in found}


HEADERS = headers()


def section_of(line: int) -> int:
    """The section that a line stands in; 0 for the header of the file."""
    return max((number for number, start in HEADERS.items() if start <= line), default=0)


def defined() -> dict[str, int]:
    """Every name that the module itself binds, with the line of its first binding; imports are left out."""
    lines: dict[str, int] = {}
    for node in TREE.body:
        if isinstance(node, Definition):
            lines.setdefault(node.name, node.lineno)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (name for target in targets for name in ast.walk(target)):
                if isinstance(name, ast.Name):
                    lines.setdefault(name.id, node.lineno)
    return lines


class Uses(ast.NodeVisitor):
    """Names that a statement reads when it, or what it defines, is executed: annotations do not count."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.setdefault(node.id, node.lineno)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        for part in (node.target, node.value):
            if part is not None:
                self.visit(part)

    def visit_arg(self, node: ast.arg) -> None:
        """Only its annotation is inside."""

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)


def uses(node: ast.AST) -> dict[str, int]:
    visitor = Uses()
    visitor.visit(node)
    return visitor.names


def global_names() -> dict[str, set[str]]:
    """For each top-level function and class the names that really are globals in it or further in."""

    def inside(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_global():
                yield symbol.get_name()
        for child in table.get_children():
            yield from inside(child)

    top = symtable.symtable(SOURCE, MODULE.name, "exec")
    return {child.get_name(): set(inside(child)) for child in top.get_children()}


def label(node: ast.stmt) -> str:
    if isinstance(node, Definition):
        return node.name
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return ast.unparse(target)
    return f"line {node.lineno}"


def downward() -> list[tuple[str, str, str]]:
    """(user, used, "section -> section") of every reference to a name of a later section."""
    lines, real, found = defined(), global_names(), []
    for node in TREE.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or section_of(node.lineno) == 0:
            continue
        for name in sorted(uses(node)):
            if name not in lines or (isinstance(node, Definition) and name not in real[node.name]):
                continue
            here, there = section_of(node.lineno), section_of(lines[name])
            if there > here:
                found.append((label(node), name, f"{here} -> {there}"))
    return found


def test_sections_are_all_there_in_order() -> None:
    found = re.findall(r"(?m)^# =+\n# (\d+)\. (\w+)", SOURCE)
    assert found == [(str(number), title) for number, title in SECTIONS.items()]


def io_in(node: ast.stmt, real: dict[str, set[str]]) -> Iterator[str]:
    """What in a top-level statement names, or imports, a module that does I/O, reads a clock or makes chance."""
    banned = IO_MODULES | IO_MORE
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            yield from (f"import {a.name}" for a in part.names if a.name.split(".")[0] in banned)
        elif isinstance(part, ast.ImportFrom) and str(part.module).split(".")[0] in banned:
            yield f"from {part.module} import"
    for name, line in uses(node).items():
        if name in banned and not (isinstance(node, Definition) and name not in real[node.name]):
            yield f"line {line}: {name}"


@pytest.mark.parametrize("number", PURE)
def test_pure_section_names_no_io_module(number: int) -> None:
    assert number in HEADERS
    real = global_names()
    found = [text for node in TREE.body if section_of(node.lineno) == number for text in io_in(node, real)]
    assert found == []


def test_no_section_uses_a_later_one() -> None:
    found = [(user, used, way) for user, used, way in downward() if (user, used) not in ALLOWED]
    assert found == []


def test_allowed_references_all_exist() -> None:
    assert {(user, used) for user, used, _ in downward()} >= ALLOWED


def test_names_are_bound_once() -> None:
    """A second binding further down would hide a reference down the file, and confuse its reader."""
    seen: dict[str, int] = {}
    twice = []
    for node in TREE.body:
        names = [node.name] if isinstance(node, Definition) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        for name in names:
            if name in seen:
                twice.append(f"{name}: lines {seen[name]} and {node.lineno}")
            seen.setdefault(name, node.lineno)
    assert twice == []


def test_only_main_ends_the_program() -> None:
    found = [
        f"line {node.lineno}: {ast.unparse(node)[:60]}"
        for node in ast.walk(TREE)
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "exit", "quit"))
        or (isinstance(node, ast.Raise) and node.exc is not None and "SystemExit" in ast.unparse(node.exc))
    ]
    assert len(found) <= 2, found  # `version` at the top, and the one below `if __name__ == "__main__"`


def test_checks_of_this_file_see_what_they_should() -> None:
    """The walker on a sample: a test that cannot fail is none."""
    sample = ast.parse("def f(a: A = B) -> C:\n    x: D = E\n    return g(a, [h for h in i])\n").body[0]
    assert set(uses(sample)) >= {"B", "E", "g", "i"}
    assert not {"A", "C", "D"} & set(uses(sample))
    assert section_of(1) == 0
