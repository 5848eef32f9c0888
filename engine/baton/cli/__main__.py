"""`python -m baton.cli`: the command `baton` of this Python."""

import sys

from baton.cli.main import main

sys.exit(main())
