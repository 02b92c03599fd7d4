"""Makes a folder like those that transformers downloads: a small Llama, with its tokenizer.

    python examples/small_llama.py FOLDER

The weights are random. The Llama has what large ones have: grouped attention (two key-value heads
for four heads), and an embedding that is tied to the head. The tokenizer is learnt from the source
code of Python's standard library, which is also the text that the examples train on.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

END, VOCABULARY = "<end>", 1024


def source_code(num_files: int = 30) -> Iterator[str]:
    """Yields the texts of files of the standard library."""
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:num_files]:
        yield path.read_text(encoding="utf-8")


def blocks(tokenizer: Any, length: int) -> np.ndarray:
    """Returns the text as tokens, int32 [blocks, length]."""
    tokens: list[int] = []
    for ids in tokenizer(list(source_code()))["input_ids"]:
        tokens += [*ids, tokenizer.eos_token_id]
    usable = len(tokens) // length * length
    return np.array(tokens[:usable], np.int32).reshape(-1, length)


def make(folder: Path) -> Path:
    """Makes the folder if it does not exist; call it before torchax is enabled."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(source_code(), VOCABULARY, special_tokens=[END], show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=END
    )
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    # A folder of this name is complete, also if the program is killed here.
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        unfinished = Path(parent, "unfinished")
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # Otherwise another program has made it in the meantime.
                raise
    return folder


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
