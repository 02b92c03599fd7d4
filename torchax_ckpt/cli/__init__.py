"""The command line ``torchax-ckpt``: inspects, verifies, compares and converts checkpoints."""
