"""Programs for development, outside the wheel."""
