"""Checks of grammars in processes beside the front.

`messages`: requests and replies; `worker`: the program of such a process; `process`: it, as the
front sees it; `turns`: whose check is next; `history`: what clients and texts have cost; `lane`:
checks that wait for some processes; `queue`: which lane does a check; `reader`: the grammar of one
request, checked now or before.

`walk`: a part of each check, which walks through a compiled grammar.
"""
