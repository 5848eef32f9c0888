"""`baton bench`: load generators.

words     text of exact length for prompts
load      one measured request, and rounds of a closed loop
replay    a recorded trace, at its own times
serving   the command: arms that are compared round by round
"""
