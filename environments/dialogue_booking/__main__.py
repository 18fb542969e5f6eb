"""`python -m environments.dialogue_booking process ...`: `hermes-rl env` with its name."""

import sys

from hermes_rl.cli import env_main

if __name__ == "__main__":
    sys.exit(env_main(__package__))
