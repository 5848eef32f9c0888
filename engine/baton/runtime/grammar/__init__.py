"""Structured output in a rank: which tokens a grammar allows next.

| module | holds |
|---|---|
| `token_trie` | the tokenizer as llguidance needs it |
| `limits` | bounds of the work |
| `store` | compiled grammars by text, and the thread that compiles them |
| `token_constraint` | limits on the tokens of one sequence, as the sampler sees them |
| `sequence_grammar` | the matcher of one sequence |
| `reasoning_tracker` | where the reasoning of an answer begins and ends |
| `gated_grammar` | a reasoning with the matcher behind it, or with a limit |
| `token_masks` | allowed tokens of the rows of a step |
| `waiting` | requests that wait for their grammar before the scheduler gets them |
"""
