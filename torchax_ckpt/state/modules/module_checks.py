"""Refuses modules that cannot be attached, with an error that names the tensor and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchax_ckpt import torchax_backend
from torchax_ckpt.errors import AttachError, UnsupportedLeafError
from torchax_ckpt.layout import names
from torchax_ckpt.state.modules.module_tensors import Slot
from torchax_ckpt.state.stored_entries import extra_state_key

_MAX_LISTED = 5


def check(module: torch.nn.Module, slots: Sequence[Slot], key_path: tuple[str, ...]) -> None:
    """Raises AttachError or UnsupportedLeafError unless the module can be saved and trained."""
    where = names.join(key_path)
    root, _ = torchax_backend.unwrap_jittable(module)
    with torchax_backend.native_torch():  # through torchax, attributes take longer to read
        whys = {slot.fqn: torchax_backend.why_unsupported(slot.tensor) for slot in slots}
    for fqn, why in whys.items():
        if why:
            name = names.join((*key_path, fqn))
            raise UnsupportedLeafError(f"{name}: {why}", key_path=name)
    parameters = [s for s in slots if isinstance(s.tensor, torch.nn.Parameter)]
    if parameters and all(s.is_on_cpu for s in parameters):
        is_prepared = getattr(root, "_is_accelerate_prepared", False)
        by = "accelerate's prepare moves models there: call Accelerator(device_placement=False). "
        raise AttachError(
            f"{where}: all parameters of {type(root).__name__} are on the CPU. {by * is_prepared}"
            "Move the model first: torchax.enable_globally(); model.to('jax'). Build the optimizer "
            "after that.",
            key_path=where,
        )
    if on_cpu := [names.join((*key_path, s.fqn)) for s in parameters if s.is_on_cpu]:
        more = f" and {len(on_cpu) - _MAX_LISTED} more" if len(on_cpu) > _MAX_LISTED else ""
        raise AttachError(
            f"{where}: {len(on_cpu)} of {len(parameters)} parameters of {type(root).__name__} are "
            f"on the CPU, the others are not: {', '.join(on_cpu[:_MAX_LISTED])}{more}. Move the "
            "whole model after its last part was added: model.to('jax'). Build the optimizer after "
            "that. Make a tensor that is to stay on the CPU a buffer.",
            key_path=on_cpu[0],
        )
    known = {n for s in slots for n in (s.fqn, *s.aliases)}
    paths = [path for path, _ in root.named_modules(remove_duplicate=False)]
    known |= {extra_state_key(names.without_compile(path)) for path in paths}
    stored = map(names.without_compile, root.state_dict(keep_vars=True))
    if unknown := [k for k in stored if k not in known]:
        name = names.join((*key_path, unknown[0]))
        raise UnsupportedLeafError(
            f"{name}: is in state_dict() but is neither a parameter nor a buffer (a hook or an "
            "overridden _save_to_state_dict adds it). Return it from get_extra_state()",
            key_path=name,
        )
