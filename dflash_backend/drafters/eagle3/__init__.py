"""EAGLE-3 (arXiv 2503.01840): an autoregressive drafter, which reads features of three target layers and drafts token
by token, each pass from the output of the one before."""
