"""How the agent behaves."""
