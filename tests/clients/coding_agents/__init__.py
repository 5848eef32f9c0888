"""Codex CLI and Claude Code in a network namespace of their own; `recording_proxy` is their way to the cluster."""
