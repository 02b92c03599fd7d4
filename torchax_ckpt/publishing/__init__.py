"""Publishing: finished steps of a run become folders that other programs load.

- ``follower``: watches a run, and publishes the steps that are due;
- ``folder_form``: what a folder contains, and in which format;
- ``published_folders``: the folders on disk, and ``latest``, which names the newest of them.

``torchax-ckpt follow`` and ``torchax_ckpt.integrations.huggingface.Publisher`` are made of these.
"""
