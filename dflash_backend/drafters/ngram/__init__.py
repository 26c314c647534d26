"""Prompt lookup: drafts are what followed the last tokens where they occurred before in the same request."""
