"""`baton simulate`: the production scheduler over a recorded trace, on a virtual clock.

Standard library only.

`baton engine --simulate`, the production engine without a model, is `baton.runtime.simulated`.

trace.py   trace files → requests with arrival times, token ids made from block ids
node.py    one engine rank: the loop of runtime.engine_loop with a model instead of a device
report.py  what requests saw, as a table and as JSON
chart.py   a self-contained SVG of TTFT distributions
main.py    flags, progress, Ctrl-C
"""
