"""What tests share: scripted servers, an oracle, ours under uvicorn, Valkey."""
