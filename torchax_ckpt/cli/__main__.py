"""``python -m torchax_ckpt.cli``, the same as the command ``torchax-ckpt``."""

from torchax_ckpt.cli.main import main

main()
