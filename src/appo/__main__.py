"""`python -m appo COMMAND` is `appo COMMAND`."""

import sys

from appo.algorithms.cli import main

if __name__ == "__main__":
    sys.exit(main())
