"""`baton bench`: a recorded trace, sent to servers.

words              text of exact length for prompts
measured_request   one request, and the times its client saw
replay             the requests of a trace, at its own times
main               the command
"""
