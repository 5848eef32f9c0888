"""Grammars of tool calls, as each format of `--tool-parser` writes them.

| module | holds |
|---|---|
| `call_rules` | calls that an answer may have or must have, and the schemas of their arguments |
| `call_format` | interface of the formats, and the parts that several share |
| `json_calls` | formats in which a call is a JSON object |
| `header_calls` | formats in which a call is a header between markers and a JSON object |
| `parameters`, `parameter_values` | parameters that are written one by one, and their values |
| `tag_calls` | formats in which a call is a row of tags |
| `pythonic_calls`, `gpt_oss_calls` | calls in Python, and as messages in channels |
| `formats` | the format of each name |
| `call_grammar` | an answer of calls alone, of calls in text, of calls or a constrained answer |

Texts that follow these grammars are read back by engine/text/src/stream/tools (Rust).
"""
