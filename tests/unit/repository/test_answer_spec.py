"""The front's structs of an answer's options are those that Rust defines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import answer_spec

ROOT = Path(__file__).parents[3]


def test_options_of_an_answer_are_those_of_rust() -> None:
    made = (ROOT / answer_spec.TARGET).read_text()
    assert answer_spec.python_source() == made, "run: python -m tools.answer_spec"


def test_option_of_an_answer_is_one_field_in_rust() -> None:
    spec = (ROOT / answer_spec.STRUCTS).read_text()
    option = "    /// Texts are in capitals.\n    #[serde(default)]\n    pub capitals: bool,\n"
    structs = answer_spec.PythonStructs({name: name for _, name in answer_spec.ENUMS})
    before = "    #[serde(default)]\n    pub choices: Vec<ChoiceSpec>,\n"
    assert spec.count(before) == 1
    made = "".join(structs.write(spec.replace(before, option + before)))
    expected = '    capitals: bool = False\n    """Texts are in capitals."""\n'
    assert made.replace(expected, "") == "".join(structs.write(spec))
    assert expected in made
    with pytest.raises(KeyError):
        list(structs.write(spec.replace(before, option.replace("bool", "Unknown") + before)))
