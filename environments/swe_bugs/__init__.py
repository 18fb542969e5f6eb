"""Small git repositories with bugs."""

from environments.swe_bugs.environment import SweBugs

__all__ = ["SweBugs"]
