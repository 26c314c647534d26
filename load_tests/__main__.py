"""`python -m load_tests`: see `load_tests.cli`."""

import sys

if __name__ == "__main__":
    from load_tests.cli import main

    sys.exit(main())
