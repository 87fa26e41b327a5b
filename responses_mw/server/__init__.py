"""The standalone server: everything that depends on uvicorn."""
