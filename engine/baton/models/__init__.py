"""Models: what a checkpoint is (`spec_reader`, `weights`, no torch), how it is loaded (`load`), how it is computed (`decoder`)."""
