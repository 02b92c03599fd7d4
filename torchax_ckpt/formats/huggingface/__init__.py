"""Models as Hugging Face's libraries store them: configs, tokenizers, adapters, folders.

The modules of this package import none of these libraries.
"""
