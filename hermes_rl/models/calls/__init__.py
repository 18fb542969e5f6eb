"""One model call over as many requests as it takes: routes, retries, recovery."""
