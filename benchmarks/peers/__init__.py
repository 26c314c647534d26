"""This engine beside vLLM, llama.cpp and transformers on one machine: `python -m benchmarks.peers`."""
