"""Structure and language of the sources, measured: import cycles, sizes of folders, files and functions, names, prose.

`allowed.txt` lists what does not keep the rules yet, and may only shrink. `python -m tests.structure write`
rewrites it; without `write` the command prints figures of each package and crate.
"""
