"""One file for each sub-command of `dflash-triton`."""
