"""Families without blocks of our own: transformers' module behind our pages and scheduler.

| module | holds |
|---|---|
| `choice` | which implementation serves a checkpoint, and what is refused (no torch) |
| `bridge` | the attention function that transformers' modules call |
| `model` | the module as a served model: loading, steps |
"""
