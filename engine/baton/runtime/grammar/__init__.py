"""Structured output in a rank: which tokens a grammar allows next.

| module | holds |
|---|---|
| `token_trie` | the tokenizer as llguidance needs it |
| `limits` | bounds of the work |
| `store` | compiled grammars by text, and the thread that compiles them |
| `sequence_grammar` | the matcher of one sequence |
| `token_masks` | allowed tokens of the rows of a step |
| `waiting` | requests that wait for their grammar before the scheduler gets them |
"""
