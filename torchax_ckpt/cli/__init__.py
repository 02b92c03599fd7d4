"""The command line ``torchax-ckpt``: looks at the steps of a run, compares and converts them."""
