"""`python -m gradwire`, for where the command `gradwire` is not on the path."""

import sys

from gradwire.trainer.__main__ import main

sys.exit(main())
