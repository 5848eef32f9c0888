"""Lines that `baton up` prints for a first answer."""

from __future__ import annotations

import shlex

from baton.server.up import greeting

URL = "http://127.0.0.1:8000"


def curl(text: str) -> list[str]:
    """Arguments of the curl line, as a shell splits them."""
    line = text[text.index("curl ") : text.index("from openai")]
    return shlex.split(line.removesuffix("import os\n"))


def test_greeting_sends_the_key_that_the_cluster_wants() -> None:
    header = "authorization: Bearer it's a $KEY"
    given = greeting(URL, "m", api_key="it's a $KEY")
    assert header in curl(given)
    assert """api_key="it's a $KEY")""" in given


def test_greeting_leaves_a_key_of_the_environment_there() -> None:
    given = greeting(URL, "m", api_key="secret", key_in_environment=True)
    assert "secret" not in given
    assert '-H "authorization: Bearer $BATON_API_KEY"' in given
    assert 'import os\nfrom openai import OpenAI\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", ' in given
    assert 'api_key=os.environ["BATON_API_KEY"])' in given


def test_greeting_of_an_open_cluster_names_no_key() -> None:
    given = greeting(URL, "m", key_in_environment=True)
    assert "authorization" not in given
    assert 'api_key="none")' in given
    assert curl(given)[-1].startswith('{"model":"m"')
