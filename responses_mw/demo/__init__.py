"""A demo that needs no model. A tour with the `openai` client calls responses-mw, which calls a rule-based upstream."""
