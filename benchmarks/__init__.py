import dflash_backend as dflash_backend  # before torch, whose threads then wait as an engine's do
