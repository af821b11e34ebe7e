"""FF-12: under `python -O` assertions vanish, so none may do anything."""

import ast

import pytest

from tests.helpers.server import ROOT

PURE = {"isinstance", "len", "all", "any", "set", "sorted", "min", "max", "sum", "int", "bool", "str", "type", "tuple", "list"}
PURE_METHODS = {"keys", "values", "items", "is_contiguous", "dim", "numel", "stride", "any", "all", "tolist", "startswith"}
FILES = sorted((ROOT / "slipstream").rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({f.relative_to(ROOT).parts[1] for f in FILES if len(f.relative_to(ROOT).parts) > 2}))
def test_ff12_no_assertion_has_a_side_effect(folder: str):
    for file in (ROOT / "slipstream" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert):
                for part in ast.walk(node.test):
                    assert not isinstance(part, ast.NamedExpr | ast.Await | ast.Yield), f"{file}:{node.lineno}"
                    if isinstance(part, ast.Call):
                        name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "?")
                        assert name in (PURE_METHODS if isinstance(part.func, ast.Attribute) else PURE), (
                            f"{file}:{node.lineno}: {name}() is called in an assertion"
                        )
