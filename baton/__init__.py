"""The command: up, demo, chat, generate, doctor, bench."""
