"""Structured output: grammars compiled by llguidance, matched token by token, and the masks of a step's logits."""
