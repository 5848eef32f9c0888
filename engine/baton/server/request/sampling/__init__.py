"""Sampling parameters of a request, and the logprobs that it asks for."""
