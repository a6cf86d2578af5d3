"""Small software-engineering tasks with one bug each, and the tools to fix them: a load whose score shows whether state is right."""
