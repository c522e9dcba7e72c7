"""What a notebook wrote is what later chapters import: cells tagged `saved` against utils/."""

import ast
import difflib

import nbformat

from utils.notebooks import COURSE, code_cells, tags

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions(source):
    """Functions and classes at the top of a source: {name: text, decorators included}."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, DEFINITIONS):
            start = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
            found[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
    return found


def library(folder=COURSE / "utils"):
    """All top-level definitions of the modules below `folder`: {name: {module: text}}."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for name, text in definitions(path.read_text(encoding="utf-8")).items():
            found.setdefault(name, {})[path.relative_to(folder.parent).as_posix()] = text
    return found


def drift(notebook, name, modules):
    """Problems of the `saved` cells of one notebook, one text each."""
    for number, cell in enumerate(code_cells(notebook), start=1):
        if "saved" not in tags(cell):
            continue
        where = f"{name}, code cell {number}"
        here = definitions(cell["source"])
        if not here:
            yield f"{where}: tagged saved, but defines no function or class"
        allowed = (*DEFINITIONS, ast.Import, ast.ImportFrom)
        if any(not isinstance(node, allowed) for node in ast.parse(cell["source"]).body):
            yield f"{where}: a saved cell holds definitions and imports only"
        for definition, text in here.items():
            there = modules.get(definition, {})
            if list(there.values()).count(text) == 1:  # another module may use the name otherwise
                continue
            if len(there) != 1:
                places = ", ".join(there) or "no module of utils/"
                yield f"{where}: {definition} stands in {places}; it should be exactly one"
                continue
            [(module, saved)] = there.items()
            lines = difflib.unified_diff(
                text.splitlines(), saved.splitlines(), where, module, lineterm=""
            )
            yield f"{where}: {definition} differs from {module}\n" + "\n".join(lines)


def main(paths):
    modules = library()
    problems = []
    for path in paths:
        problems += drift(nbformat.read(path, as_version=4), path.name, modules)
    print("\n\n".join(problems) or "no saved cell differs from utils/")
    return bool(problems)
