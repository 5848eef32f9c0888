"""Prompts of a request.

| module | holds |
|---|---|
| `forms` | the ways in which a body states its prompts |
| `truncation` | prompts that are cut to a number of tokens |
| `placement` | where P and D meet for each prompt, and its rank |
| `items` | one answer to one prompt |
"""
