"""Training a drafter for a target: its data, its network, the loop, and what is published."""
