"""Shared by tests: scripted servers, checks of event streams, `responses-mw` under uvicorn, and Valkey."""
