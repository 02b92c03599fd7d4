"""What a folder of a step's weights contains, and in which format."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from torchax_ckpt.formats.huggingface import model_folder
from torchax_ckpt.formats.huggingface.model_folder import FolderFiles
from torchax_ckpt.formats.safetensors_io import export_safetensors
from torchax_ckpt.formats.weights import Weights, cast, weights_at
from torchax_ckpt.layout.selection import Selection
from torchax_ckpt.stored.stored_step import StoredLeaf, StoredStep

Format = Literal["hf", "peft", "safetensors"]
Dtype = Literal["bf16", "fp16", "fp32"]
_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderForm:
    """What is written of a step, and how; raises ValueError if attributes contradict each other."""

    format: Format = "hf"
    dtype: Dtype | None = None
    config: str | os.PathLike[str] | None = None
    max_shard_bytes: int | None = None
    at: str | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name, found, choices in (
            ("format", self.format, get_args(Format)),
            ("dtype", self.dtype, (None, *_DTYPES)),
        ):
            if found not in choices:
                expected = ", ".join(map(str, choices))
                raise ValueError(f"{name}: expected one of {expected}, found {found!r:.80}")
        if self.config is not None and self.format == "safetensors":
            raise ValueError("config: needs the format hf or peft; omit it, or choose one of these")
        if self.max_shard_bytes is not None and self.format == "peft":
            raise ValueError("max_shard_bytes: PEFT has no files of several shards; omit it")
        if self.max_shard_bytes is not None and self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: expected at least 1, found {self.max_shard_bytes}")
        self._selection()

    def weights_of(self, stored: StoredStep) -> Weights:
        """Returns the weights of a step, selected, renamed and cast; may raise SelectionError."""
        weights = weights_at(stored, self.at, self._selection())
        return weights if self.dtype is None else cast(weights, _DTYPES[self.dtype])

    def texts_of(self, stored: StoredStep) -> FolderFiles | None:
        """Returns the text files that say what the model is; None for weights alone."""
        if self.format == "safetensors":
            return None
        config = None if self.config is None else Path(self.config)
        return model_folder.files_of(stored, self.at, config)

    def write(
        self,
        stored: StoredStep,
        weights: Weights,
        texts: FolderFiles | None,
        out: Path,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> tuple[list[Path], list[StoredLeaf]]:
        """Writes to a folder, of safetensors also to a file; returns the files and their leaves.

        Raises MismatchError if the format needs adapters or allows none.
        """
        pieces: dict[Path, tuple[Weights, dict[Path, str]]] = {out: (weights, {})}
        if texts is not None and self.format == "peft":
            pieces = model_folder.adapters_in(out, weights, texts)
        elif texts is not None:
            pieces = {out: model_folder.model_in(out, weights, texts)}
        paths: list[Path] = []
        leaves: list[StoredLeaf] = []
        for place, (piece, files) in pieces.items():
            size = self.max_shard_bytes
            paths += export_safetensors(
                stored, piece, place, max_shard_bytes=size, texts=files, on_bytes=on_bytes
            )
            leaves += piece.leaves.values()
        return paths, leaves

    def _selection(self) -> Selection | None:
        """Returns a new selection, since each can be used once; None if all weights are written."""
        if not (self.include or self.exclude or self.rename):
            return None
        return Selection(self.include or None, self.exclude, self.rename)
