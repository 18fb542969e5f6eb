"""Who answers: providers, keys, prices, routes and what an endpoint can do."""
