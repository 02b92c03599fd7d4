"""Reads and writes weights as safetensors, files of ``torch.save``, or checkpoints of DCP.

The modules in ``torchax_ckpt.formats`` use neither torchax nor devices and need no accelerator.
"""
