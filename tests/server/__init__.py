"""Wire tests against a real Triton server."""
