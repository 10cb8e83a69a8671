"""`python -m gncprior` is the command `gncprior`."""

import sys

from gncprior.cli import main

if __name__ == "__main__":
    sys.exit(main())
