"""Grammars whose rules or references lead from one to the next: llguidance recurses along them."""

from __future__ import annotations

from typing import Any


def reference_chain(length: int) -> dict[str, Any]:
    """A schema of arrays in arrays, each behind a reference."""
    defs: dict[str, Any] = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "string"}}}


def rule_chain(length: int) -> str:
    """A grammar in EBNF."""
    rules = [f'r{i} ::= "x" r{i + 1}' for i in range(length)]
    return "\n".join(["root ::= r0", *rules, f'r{length} ::= "z"'])


def lark_chain(length: int) -> str:
    """A grammar in llguidance's own language."""
    rules = [f'r{i}: "x" r{i + 1}' for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "z"'])
