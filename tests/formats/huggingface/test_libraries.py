"""Folders that transformers and PEFT load, from steps of their models; with the real libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.commands import run, run_json
from support.compare import bits
from support.models import values
from support.training import before_enabling, fsdp_mesh, fsdp_rule, save
from support.waiting import wait_until

from torchax_ckpt import TorchaxCheckpointer, load_torch_state_dict, policies, warm_start
from torchax_ckpt.cli import exit_codes
from torchax_ckpt.formats.huggingface.model_folder import names_in_file
from torchax_ckpt.integrations.huggingface import Publisher
from torchax_ckpt.publishing import Reader

pytestmark = pytest.mark.slow

WORDS = ["a", "b", "c", "[UNK]"]
IDS = [[0, 1, 2, 3, 5, 8, 13, 21]]


@contextlib.contextmanager
def native() -> Iterator[None]:
    """A program without torchax; the libraries' own warnings are not what is tested."""
    with before_enabling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def llama(**settings: Any) -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    with native():
        config = transformers.LlamaConfig(**{**sizes, **heads, **settings})
        model = transformers.LlamaForCausalLM(config)
        model.generation_config.max_new_tokens = 3
        return model.eval()


def tokenizer() -> Any:
    import tokenizers
    import transformers

    with native():
        words = tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
        made = tokenizers.Tokenizer(words)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
        found.chat_template = "{{ messages }}"
        return found


def logits(model: Any) -> Any:
    with native(), torch.no_grad():
        return bits(model(torch.tensor(IDS)).logits)


def on_jax(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to("jax")
        getattr(model, "get_base_model", lambda: model)().tie_weights()
    return model


@dataclasses.dataclass
class Run:
    directory: Path
    weights: dict[str, Any]
    logits: Any


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps of a tied Llama, sharded over eight devices, with a tokenizer."""
    directory = tmp_path_factory.mktemp("tied") / "run"
    model = llama(tie_word_embeddings=True)
    expected, known = logits(model), values(model.state_dict())
    on_jax(model)
    keep = policies.PreserveAll()
    with TorchaxCheckpointer(directory, preservation_policy=keep) as ckpt:
        ckpt.attach(model, tokenizer=tokenizer(), shardings=fsdp_rule(fsdp_mesh()))
        for step, loss in enumerate((3.0, 1.0, 2.0), 1):
            ckpt.save(step, metrics={"loss": loss}, force=True)
    return Run(directory, known, expected)


def load(folder: Path, **settings: Any) -> tuple[Any, dict[str, Any]]:
    import transformers

    with native():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, **settings
        )
    return model.eval(), info


def contents(folder: Path) -> dict[str, bytes]:
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in files.items() if name != "digests.json"}


def test_a_folder_loads_as_the_model_that_was_saved(tied: Run, tmp_path: Path) -> None:
    import transformers

    out = tmp_path / "out"
    whole = tmp_path / "whole"
    run("export", tied.directory, whole, "--format", "hf")
    result = run_json("follow", tied.directory, tmp_path / "published", "--once")
    assert contents(Path(result["folder"])) == contents(whole)
    sharded = ("--format", "hf", "--max-shard-size", "4kB")
    result = run_json("export", tied.directory, out, *sharded)
    assert (result["step"], result["has_config"]) == (3, True)
    assert (out / "model.safetensors.index.json").exists()
    model, info = load(out)
    assert not any(info.values()), info
    assert values(model.state_dict()) == tied.weights
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert logits(model) == tied.logits
    assert model.generation_config.max_new_tokens == 3
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    with native():
        loaded = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert loaded("a c x")["input_ids"] == [0, 2, 3]
    assert loaded.chat_template == "{{ messages }}"
    # As transformers' own folder, but for the number of shards.
    own = tmp_path / "own"
    with native():
        model.save_pretrained(own)
        loaded.save_pretrained(own)
    theirs, ours = ({p.name for p in folder.iterdir()} for folder in (own, out))
    assert {n for n in ours if "safetensors" not in n} == theirs - {"model.safetensors"}
    with native():
        names = safetensors.torch.load_file(own / "model.safetensors").keys()
    assert sorted(names) == sorted(
        json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    )


def test_a_cast_rounds_as_torch_does(tied: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("export", tied.directory, "1", out, "--format", "hf", "--dtype", "bf16")
    model, info = load(out, dtype="auto")
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
    expected = llama(tie_word_embeddings=True)
    with native():
        expected.load_state_dict(load_torch_state_dict(tied.directory))
        assert values(expected.bfloat16().state_dict()) == values(model.state_dict())


def test_weights_that_the_config_does_not_tie_are_written_under_each_name(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=False)
    with native():
        model.lm_head.weight = model.model.embed_tokens.weight  # tied by hand
    expected = logits(model)
    model.to("jax")
    model.lm_head.weight = model.model.embed_tokens.weight
    save(tmp_path / "run", model)
    run("export", tmp_path / "run", tmp_path / "out", "--format", "hf")
    loaded, info = load(tmp_path / "out")
    assert not any(info.values())
    assert logits(loaded) == expected


def test_a_model_on_meta_starts_from_a_folder_with_its_ties_and_positions(
    tied: Run, tmp_path: Path
) -> None:
    import transformers

    run("export", tied.directory, tmp_path / "a", "--format", "hf", "--max-shard-size", "4kB")
    settings: dict[str, Any] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    with native():
        config = transformers.AutoConfig.from_pretrained(tmp_path / "a")
        config.rope_parameters = settings  # other positions than the default
        expected = transformers.AutoModelForCausalLM.from_config(config)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        buffers = values(dict(expected.named_buffers()))
    rule = fsdp_rule(fsdp_mesh())
    report = warm_start(model, tmp_path / "a", shardings=rule)
    assert not report.missing
    assert not report.unexpected
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert values(model.state_dict()) == tied.weights
    assert values(dict(model.named_buffers())) == buffers
    array = model.lm_head.weight.jax()
    assert array.sharding == rule("", array)


def adapters() -> Any:
    import peft

    model = llama(attention_bias=True)
    with native():
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        found = peft.get_peft_model(model, config)
        other = peft.LoraConfig(r=3, target_modules=["k_proj"], modules_to_save=["lm_head"])
        found.add_adapter("second/one", other)
        for name, parameter in found.named_parameters():
            if "lora_B" in name:  # zero at first, so that an adapter would change nothing
                torch.nn.init.normal_(parameter)
        return found.eval()


def test_adapters_load_as_those_that_were_saved(tmp_path: Path) -> None:
    import peft

    model = adapters()
    expected = {}
    for name in model.peft_config:
        with native():
            model.set_adapter(name)
        expected[name] = logits(model)
    assert len(set(expected.values())) == 2
    with native():
        model.set_adapter("default")
        base = {n: t.clone() for n, t in model.get_base_model().state_dict().items()}
    with native():
        model.save_pretrained(tmp_path / "own", selected_adapters=["default"])
    on_jax(model)
    save(tmp_path / "run", model)
    said = run("export", tmp_path / "run", tmp_path / "x", "--format", "hf", code=exit_codes.USAGE)
    assert "adapters default, second/one" in said
    out = tmp_path / "out"
    run("export", tmp_path / "run", out, "--format", "peft")
    run("follow", tmp_path / "run", tmp_path / "published", "--format", "peft", "--once")
    assert contents(tmp_path / "published" / "step-1") == contents(out)
    with native():
        ours, theirs = (
            safetensors.torch.load_file(folder / "adapter_model.safetensors")
            for folder in (out, tmp_path / "own")
        )
        assert values(ours) == values(theirs)
    configs = [json.loads((f / "adapter_config.json").read_text()) for f in (out, tmp_path / "own")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]
    folders = {"default": out, "second/one": out / "second%2Fone"}
    for name, folder in folders.items():
        plain = llama(attention_bias=True)
        with native():
            kept = {
                n.replace(".base_layer", "").replace(".original_module", ""): t
                for n, t in base.items()
                if "lora_" not in n and "modules_to_save" not in n
            }
            plain.load_state_dict(kept)
            loaded = peft.PeftModel.from_pretrained(plain, folder).eval()
        assert logits(loaded) == expected[name]


def test_adapters_and_the_whole_model_are_published_on_cadences_of_their_own(
    tmp_path: Path,
) -> None:
    model = on_jax(adapters())
    trained = model.get_parameter("base_model.model.lm_head.modules_to_save.second/one.weight")
    often, rarely, keep = tmp_path / "often", tmp_path / "rarely", policies.PreserveAll()
    with (
        TorchaxCheckpointer(tmp_path / "run", preservation_policy=keep) as ckpt,
        Publisher(ckpt, often, format="peft", every=2),
        Publisher(ckpt, rarely, format="safetensors", every=3),
    ):
        ckpt.attach(model)
        for step in range(1, 8):
            trained.data = trained.data + 1
            ckpt.save(step, force=True)
            ckpt.wait_until_finished()
            due = [out for out, every in ((often, 2), (rarely, 3)) if step % every == 0]
            for out in due:
                wait_until((out / f"step-{step}").exists)
    assert sorted(p.name for p in often.glob("s*")) == ["step-2", "step-4", "step-6", "step-7"]
    assert sorted(p.name for p in rarely.glob("s*")) == ["step-3", "step-6", "step-7"]
    adapter, whole = Reader(often).poll(), Reader(rarely).poll()
    assert bits(adapter["second%2Fone/base_model.model.lm_head.weight"])[1:] == bits(trained)[1:]
    assert whole.keys() == model.state_dict().keys()


def test_names_in_files_are_those_of_peft() -> None:
    import peft
    from peft.utils import get_peft_model_state_dict

    attention = ["q_proj", "v_proj"]
    for config in (
        peft.LoraConfig(r=2, target_modules=attention, use_dora=True, modules_to_save=["mlp"]),
        peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens", "lm_head"], bias="all"),
        peft.LoraConfig(r=2, target_modules=r".*\.q_proj|.*embed_tokens", bias="lora_only"),
        peft.LoraConfig(r=2, target_modules=attention, trainable_token_indices=[1, 2]),
        peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.up_proj.weight"]),
        peft.IA3Config(target_modules=attention, feedforward_modules=[]),
        peft.LoHaConfig(r=2, target_modules=attention),
        peft.LoKrConfig(r=2, target_modules=attention),
        peft.OFTConfig(r=0, oft_block_size=4, target_modules=attention),
    ):
        model = llama(attention_bias=True)
        with native():
            model = peft.get_peft_model(model, config)
            known = model.state_dict()
            theirs = get_peft_model_state_dict(model)
            ours = names_in_file(known, "default", config.to_dict())
        assert {name: known[ours[name]].data_ptr() for name in ours} == {
            name: tensor.data_ptr() for name, tensor in theirs.items()
        }, config
