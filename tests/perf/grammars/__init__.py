"""Measurements of answers that follow grammars."""
