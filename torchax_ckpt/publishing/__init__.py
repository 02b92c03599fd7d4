"""Publishing: finished steps of a run become folders that other programs load.

``torchax-ckpt follow`` and ``torchax_ckpt.integrations.huggingface.Publisher`` are made of this.
"""
