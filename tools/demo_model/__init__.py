"""How the committed demo model is made: `python -m tools.demo_model.train --help`."""
