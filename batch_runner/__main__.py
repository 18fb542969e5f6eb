"""`python -m batch_runner` is `hermes-rl run`."""

import sys

from hermes_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
