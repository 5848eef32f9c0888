"""EBNF (GBNF, as llama.cpp, xgrammar, SGLang and vLLM take it) as a grammar in Lark.

| module | holds |
|---|---|
| `tree` | the parts of a rule, and facts about them |
| `parser` | text to rules |
| `productive` | parts that derive no text |
| `recursion` | which rules are recursive; simple recursion as repetition |
| `lexemes` | which rules may be one lexeme without a change of meaning |
| `emitter` | rules to Lark |
"""
