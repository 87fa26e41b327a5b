"""A demo that needs no model: a rule-based upstream, responses-mw in front of it, and a tour with the `openai` client."""
