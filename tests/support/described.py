"""Stand-ins for models and tokenizers of Hugging Face's libraries, with the methods they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class Config:
    """A config of transformers, as JSON."""

    num_reads = 0  # of all configs

    def __init__(self, **content: Any) -> None:
        self.content = content

    def to_json_string(self) -> str:
        Config.num_reads += 1
        return json.dumps(self.content)


class AdapterConfig:
    """A config of PEFT."""

    base_model_name_or_path: str | None = None
    task_type: str | None = None
    inference_mode = False

    def __init__(self, **content: Any) -> None:
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.content,
            "inference_mode": self.inference_mode,
            "base_model_name_or_path": self.base_model_name_or_path,
        }


class Described(torch.nn.Linear):
    """A layer with a config and a generation config, as models of transformers have them."""

    def __init__(self, **config: Any) -> None:
        super().__init__(2, 2)
        self.config = Config(model_type="linear", **config)
        self.generation_config = Config(max_length=7)


class Tokenizer:
    """A tokenizer that consists of given files."""

    def __init__(self, files: Mapping[str, bytes | str]) -> None:
        self.files = files

    def save_pretrained(self, folder: str) -> None:
        for name, content in self.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
