"""Prefill/decode-disaggregated LLM serving. The command is `baton`, see the package baton_ops."""

DISTRIBUTION = "baton-serve"
"""The name under which this package is installed, as in pyproject.toml."""
