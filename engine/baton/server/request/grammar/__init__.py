"""Structured output in a front: from the fields of a request to the text of a grammar.

| module | holds |
|---|---|
| `constraint` | the one constraint that a request's fields state |
| `lark` | pieces of llguidance's grammar language: literals, character classes, regexes |
| `json_schema` | a JSON Schema with the options of this server |
| `schema/` | schemas without parts that no answer can complete |
| `ebnf/` | grammars in EBNF (GBNF), as SGLang's `ebnf` and vLLM's `grammar` take them |
| `lark_builder` | rules of a grammar that consists of several parts |
| `tool_calls/` | grammars of tool calls, as each format writes them |
| `structural_tag` | text with tagged parts that follow grammars of their own |
| `request_grammar` | all of it for one constraint: text, check, names of what had no effect |
| `checks/` | processes that do it, and the grammar of one request, checked now or before |
"""
