"""How model calls fail: from status, headers and body to a typed error with a reason."""
