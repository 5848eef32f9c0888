"""`baton simulate`: the production scheduler over a recorded trace, on a virtual clock. Standard library only.

`baton engine --simulate`: the production engine without a model, in real time (device.py, tokens.py, live.py).

trace.py   trace files → requests with arrival times, token ids made from block ids
model.py   how long a step takes: a roofline with five numbers
node.py    one engine rank: the loop of runtime.loop with a model instead of a device
report.py  what requests saw, as a table and as JSON
chart.py   a self-contained SVG of TTFT distributions
main.py    flags, progress, Ctrl-C
device.py  a device that only takes time, for runtime.loop
tokens.py  four bytes are a token
live.py    a rank of an engine with that device
"""
