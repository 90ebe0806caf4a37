"""`python -m server` is `kaon`."""

import sys

from server.cli import main

sys.exit(main())
