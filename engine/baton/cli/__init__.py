"""The command `baton`: `main` finds the subcommand; `bench/`, `doctor/` and `drain` are the ones that live here."""
