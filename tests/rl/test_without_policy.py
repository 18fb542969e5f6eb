"""A run's configuration for work that never asks the policy."""

from hermes_rl.config import parse_config
from hermes_rl.rl.scoring import without_policy


def test_budgets_of_models_that_are_asked_still_bind() -> None:
    config = parse_config(
        {
            "env": {"name": "made_up", "judge": {"name": "critic"}},
            "model": {"name": "policy"},
            "endpoint": {"base_url": "http://127.0.0.1:9/v1", "fallbacks": [{"model": "other"}]},
            "run": {
                "budget_usd": 3,
                "model_budgets": {"policy": 1, "critic": 2},
                "model_token_budgets": {"other": 10, "critic": 20},
            },
        }
    )
    plain = without_policy(config)
    assert (plain.model.name, plain.endpoint.fallbacks) == ("noop", ())
    assert plain.run.budget_usd == 3
    assert plain.run.model_budgets == {"critic": 2}
    assert plain.run.model_token_budgets == {"critic": 20}
