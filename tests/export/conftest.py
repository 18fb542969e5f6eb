"""The paths of this folder's modules, and of those that make rows and runs with exact tokens."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (str(HERE), str(HERE.parent / "segments"), str(HERE.parent / "store")):
    if folder not in sys.path:
        sys.path.insert(0, folder)
