"""Drafters: what proposes the tokens that the target verifies, from its checkpoint to its drafts.

`registry` lists the methods. Reading a drafter's config (`resolve`, `registry`, a method's `config`) costs no torch;
running one (`base`, a method's `model` and `drafter`) does.
"""
