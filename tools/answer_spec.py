"""`python -m tools.answer_spec`: write the front's structs of an answer's options from their Rust definition.

The definition is `engine/text/src/dialect/write/spec.rs`, formatted by rustfmt: a field, its attributes
and its comments stand on lines of their own. A line or a type without a counterpart ends the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
STRUCTS = "engine/text/src/dialect/write/spec.rs"
ENUMS = (
    ("engine/text/src/dialect/mod.rs", "Dialect"),
    ("engine/text/src/dialect/write/mod.rs", "ReasoningNames"),
    ("engine/text/src/dialect/write/logprobs/tokens.rs", "TokenNames"),
)
TARGET = "engine/baton/server/text/answer_spec.py"

HEADER = '''"""Options of an answer, as `baton._native.AnswerTable.open` takes them: msgpack of `AnswerSpec`.

Made by `python -m tools.answer_spec` from `engine/text/src/dialect/write/spec.rs`; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec
'''
FOOTER = "\n\nencode_spec = msgspec.msgpack.Encoder().encode\n"
TYPES = {
    "bool": ("bool", "False"),
    "String": ("str", '""'),
    "u32": ("int", "0"),
    "u64": ("int", "0"),
    "usize": ("int", "0"),
    "f64": ("float", "0.0"),
    # It passes through the front as JSON.
    "RequestFacts": ("str", '""'),
}
_DOC = re.compile(r"^ *///(.*)$")
_ATTRIBUTE = re.compile(r"^ *#\[(.*)\]$")
_STRUCT = re.compile(r"^pub struct (\w+) \{$")
_FIELD = re.compile(r"^    pub (\w+): (.+),$")
_VARIANT = re.compile(r"^    (\w+),$")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a definition, with the comment and the attributes above it."""

    text: str
    docs: tuple[str, ...]
    attributes: tuple[str, ...]

    @property
    def has_default(self) -> bool:
        return any(re.match(r"serde\(default\b", attribute) for attribute in self.attributes)


def annotated_lines(source: str) -> Iterator[Line]:
    """Each line that is neither a comment nor an attribute."""
    docs: list[str] = []
    attributes: list[str] = []
    for text in source.splitlines():
        if doc := _DOC.match(text):
            docs.append(doc[1].strip())
        elif attribute := _ATTRIBUTE.match(text):
            attributes.append(attribute[1])
        else:
            yield Line(text, tuple(docs), tuple(attributes))
            docs.clear()
            attributes.clear()


@dataclass(frozen=True, slots=True)
class PythonStructs:
    """Writes the structs. `enums`: default member of each enum that a field may have."""

    enums: dict[str, str]

    def type_and_default(self, rust: str) -> tuple[str, str]:
        """The Python type of a field, and its value where it is left out. Raises KeyError."""
        if inner := re.fullmatch(r"Option<(.+)>", rust):
            return f"{self.type_and_default(inner[1])[0]} | None", "None"
        if inner := re.fullmatch(r"Vec<(.+)>", rust):
            return f"Sequence[{self.type_and_default(inner[1])[0]}]", "()"
        if rust in self.enums:
            return rust, self.enums[rust]
        if rust.endswith("Spec"):
            return rust, ""
        return TYPES[rust]

    def write(self, source: str) -> Iterator[str]:
        """Structs in the order in which each needs those before it."""
        found = list(re.split(r"(?m)^}$", source))
        structs = [text for text in found if re.search(r"(?m)^pub struct ", text)]
        for text in reversed(structs):
            yield "\n".join(self._write_struct(text)) + "\n"

    def _write_struct(self, text: str) -> Iterator[str]:
        is_inside = False
        for line in annotated_lines(text):
            if struct := _STRUCT.match(line.text):
                is_inside = True
                yield f"\n\nclass {struct[1]}(msgspec.Struct, frozen=True, kw_only=True):"
                yield from _docstring(line.docs)
                yield ""
            elif is_inside and line.text:
                field = _FIELD.match(line.text)
                if field is None:
                    raise ValueError(f"{STRUCTS}: {line.text!r} is no field on one line")
                python_type, default = self.type_and_default(field[2])
                value = f" = {default}" if line.has_default else ""
                yield f"    {field[1]}: {python_type}{value}"
                yield from _docstring(line.docs)


def write_enum(source: str, name: str) -> tuple[str, str]:
    """The class of an enum, and its default member."""
    before, _, rest = source.partition(f"pub enum {name} {{\n")
    *_, head = annotated_lines(before + f"pub enum {name} {{")
    lines = ["", "", f"class {name}(Enum):", *_docstring(head.docs), ""]
    default = ""
    for line in annotated_lines(rest.partition("\n}\n")[0]):
        variant = _VARIANT.match(line.text)
        if variant is None:
            raise ValueError(f"{name}: {line.text!r} is no variant without data")
        value = re.sub(r"(?<!^)(?=[A-Z])", "_", variant[1]).lower()
        lines += [f'    {value.upper()} = "{value}"', *_docstring(line.docs)]
        if "default" in line.attributes:
            default = f"{name}.{value.upper()}"
    return "\n".join(lines) + "\n", default


def _docstring(docs: tuple[str, ...]) -> list[str]:
    if not docs:
        return []
    text = "\n    ".join(docs).replace("`None`", "None")
    end = "\n    " if len(docs) > 1 else ""
    return [f'    """{text}{end}"""']


def python_source() -> str:
    """Text of the generated module."""
    classes = []
    defaults = {}
    for path, name in ENUMS:
        text, defaults[name] = write_enum((REPOSITORY / path).read_text(), name)
        classes.append(text)
    classes += PythonStructs(defaults).write((REPOSITORY / STRUCTS).read_text())
    return HEADER + "".join(classes) + FOOTER


if __name__ == "__main__":
    (REPOSITORY / TARGET).write_text(python_source(), encoding="utf-8")
