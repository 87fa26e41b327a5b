"""A demo that needs no model: a rule-based upstream, our server in front of it, and a tour with the `openai` client."""
