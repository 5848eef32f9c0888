"""Other projects' clients in front of router, prefill node and two decode nodes; their routers in front of our nodes.

    tests/clients/setup.sh                     # each client in its own environment under .venv-peers
    .venv/bin/pytest tests/clients -rs         # some minutes; what could not be installed skips with its reason

`make test-all` runs both. Each client asks from a script of its own in scripts/, under the Python of its environment,
and prints what its user sees; the test compares that with the cluster's answer to plain HTTP. While a long answer is
under way, the decode node that writes it is killed.
"""
