"""Other people's code as the reference for ours: the DFlash authors' package `dflash`, and the library `speculators`.

What they compute lies in `golden/`, written by `python -m tests.oracle.write_golden`, so that a machine without them
can compare as well. Where they are installed (`make oracle`) they run again and must give the same.
"""
