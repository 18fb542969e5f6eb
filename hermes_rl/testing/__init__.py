"""Fakes over real sockets, shipped beside the real thing."""
