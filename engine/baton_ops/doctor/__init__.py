"""`baton doctor`: checks of a machine, a fleet and a namespace.

check       result of one check, lists of checks, and how results are shown
host, gpu   checks of a machine; an engine reports the facts of its own
fleet       what routers and engines say: `FleetView`
routers     checks of the routers
engines     checks of each engine by itself
pairs       checks of prefill and decode nodes together
kubernetes  checks of a namespace, through kubectl
main        the command `baton doctor`

A check takes what was read before and returns results; it reads nothing itself. Nothing here
changes a node.
"""
