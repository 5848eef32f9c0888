"""Commands that operators run beside the engine, and the command `baton` itself.

Nothing in `baton` imports it.

Lowest first; each imports only those before it:

clients/   HTTP to routers and engines, kubectl
sim/       `baton simulate`: the scheduler on a virtual clock
launch/    `baton up`: a whole cluster on one machine, supervision of its processes
bench/     `baton bench`: a recorded trace, sent to servers
doctor/    `baton doctor`: checks of a machine, a fleet, a namespace
top        `baton top`: nodes, pairs and slow requests of a running fleet
drain      `baton drain`: take engines out of service and return them
chat       `baton chat`: a conversation in the terminal
cli/       the entry point: finds the subcommand; shell completion
"""
