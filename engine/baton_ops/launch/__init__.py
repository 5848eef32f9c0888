"""`baton up`: a whole cluster on this machine.

cluster_plan   flags, and the processes they ask for
supervisor     starts a process again when it ends or hangs
screen         the terminal while the cluster runs
traffic        requests and latencies on that screen, from the router's metrics
smoke_test     `baton up --smoke`: requests through the whole cluster
drill          `baton up --drill`: three promises shown on the cluster
holdings       gauges of what requests hold, which an idle engine has not
local_cluster  the command: router and engines from start to end
"""
