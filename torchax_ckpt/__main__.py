"""Lets ``python -m torchax_ckpt`` run the same program as ``torchax-ckpt``."""

from torchax_ckpt.cli.main import main

main()
