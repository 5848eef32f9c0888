"""The command `baton`: `main` finds the subcommand, `completion` prints scripts for shells."""
