"""The command line ``torchax-ckpt``, which inspects, compares and converts checkpoints."""
