"""`python -m baton_ops.cli`: the command `baton` of this Python."""

import sys

from baton_ops.cli.main import main

sys.exit(main())
