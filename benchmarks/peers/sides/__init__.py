"""The processes that hold one system each. They need the standard library and that system, and nothing of ours."""
