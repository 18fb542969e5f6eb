"""Who answers. Dialects translate, transports carry; `hermes_rl.wiring` joins them."""
