"""A demo that needs no model. A guided tour uses the `openai` client to call responses-mw with a rule-based upstream."""
