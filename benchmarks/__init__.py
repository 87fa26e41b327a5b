"""Benchmarks of responses_mw, run by `python -m benchmarks.run`. See README.md in this directory."""
