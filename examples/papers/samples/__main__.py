"""`python -m examples.papers.samples NAME`."""

import sys

from examples.papers.samples.make import main

if __name__ == "__main__":
    sys.exit(main())
