"""DFlash2: DFlash with a convolution along the block around each sublayer, and drafts that are chosen one after the
other among the best candidates of their positions (inco.ai/blog/dflash2, github.com/z-lab/dflash)."""
