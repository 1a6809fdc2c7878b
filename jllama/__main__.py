"""``python -m jllama``."""

import sys

from jllama.commands.cli import main

sys.exit(main())
