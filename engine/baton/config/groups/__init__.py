"""The engine's flags, a class for each heading of --help-all and docs/flags.md."""
