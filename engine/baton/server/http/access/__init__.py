"""Who may send a request: keys, web pages, names of hosts; and which client it is from."""
