"""Clients of what operators look at: HTTP to routers and engines (`http_client`), the program kubectl (`kubectl`)."""
