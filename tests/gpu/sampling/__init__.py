"""Draws on the device."""
