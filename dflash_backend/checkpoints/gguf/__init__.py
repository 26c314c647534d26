"""Targets in GGUF, the format of llama.cpp: `convert.py` turns a file once into a directory that the rest reads."""
