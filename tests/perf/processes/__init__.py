"""Processes and clients that the measurements of a running cluster share."""
