"""OpenAI-compatible HTTP in front of one or more Triton servers: stateless, so any number of them may run."""
