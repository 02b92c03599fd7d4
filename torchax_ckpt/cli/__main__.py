"""Lets ``python -m torchax_ckpt.cli`` run the same program as ``torchax-ckpt``."""

from torchax_ckpt.cli.main import main

main()
