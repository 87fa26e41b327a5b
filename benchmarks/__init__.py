"""Benchmarks of responses_mw: `python -m benchmarks.run`. See README.md beside this file."""
