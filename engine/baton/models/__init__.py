"""Models: what a checkpoint is (`spec`, no torch), how it is loaded (`load`), how it is computed (`decoder`)."""
