"""DFlash (arXiv 2602.06036): a block-diffusion drafter, which proposes all k tokens in one pass."""
