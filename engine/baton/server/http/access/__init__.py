"""Access to an engine: its key, web pages, names of hosts, and the identity of clients."""
