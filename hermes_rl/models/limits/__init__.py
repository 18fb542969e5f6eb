"""How much may run and be spent: rates, budgets, and their form shared by all workers of a run."""
