"""Structure of the sources, as far as no tool checks it: order of Rust modules, names in prose,
figures.

`python -m tests.structure` prints figures of each package and crate, and fails where they got worse
than the committed ones; `python -m tests.structure accept` commits to those of today.
"""
