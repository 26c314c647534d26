"""Checks of the source as text: sizes of files and functions, and words."""
