"""DSpark (arXiv 2607.05147, github.com/deepseek-ai/DeepSpec): DFlash with a bias on each draft's logits that follows
from the draft before it, and a head that says how sure the drafter is."""
