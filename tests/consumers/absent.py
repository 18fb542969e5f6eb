"""Import this before `openenv`: what that imports for tools of MCP, which no test here uses."""

import sys
from unittest import mock

for name in ("fastmcp", "fastmcp.client", "fastmcp.client.client"):
    sys.modules[name] = mock.MagicMock()
