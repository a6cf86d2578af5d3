"""Load over HTTP, and what came of it. Any OpenAI-compatible server will do; nothing of Baton's own is imported but its errors."""
