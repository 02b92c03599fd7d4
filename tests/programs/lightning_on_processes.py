"""A Lightning module that several processes train together.

python lightning_on_processes.py INDEX COUNT PORT DIRECTORY SEED MAX_STEPS

Environment: with ``STEP_SECS``, each batch is reported and then takes so long.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, cast

import jax
import lightning
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from processes_program import COUNT, INDEX, MESH, P, digest, init, report, rule
from torchax import interop
from torchdata.stateful_dataloader import StatefulDataLoader

from torchax_ckpt import policies, torchax_backend
from torchax_ckpt.integrations.lightning import TorchaxCheckpoint, TorchaxStrategy, checkpoint

directory, seed, max_steps = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])


class Mine(torch.utils.data.Dataset):
    # What this process has of the data, with noise of its own.
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: Any) -> Any:
        rows = np.random.default_rng(100 * INDEX + i).standard_normal(8)
        return (rows + np.random.random()).astype(np.float32)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Linear(8, 8)
        self.seen: list[str] = []

        def loss(parameters: Any, x: Any) -> Any:
            out = torch.func.functional_call(self.net, parameters, (x,))
            return ((out - x) ** 2).mean()

        self.gradients = interop.jax_jit(interop.jax_value_and_grad(loss))

    def training_step(self, batch: Any, batch_idx: Any) -> None:
        mine = np.asarray(interop.jax_view(batch))
        self.seen.append(digest(mine))
        if step_secs := float(os.environ.get("STEP_SECS", "0")):
            report(step=len(self.seen))
            time.sleep(step_secs)
        whole = jax.make_array_from_process_local_data(
            NamedSharding(MESH, P("fsdp")), mine, (COUNT * len(mine), 8)
        )
        parameters = dict(self.net.named_parameters())
        loss, gradients = self.gradients(parameters, interop.torch_view(whole))
        self.log("loss", loss)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        cast(Any, self.optimizers()).step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


with torch.device("meta"):
    module = Module()
torch.manual_seed(seed + INDEX), np.random.seed(seed + INDEX)
callback = TorchaxCheckpoint(
    directory,
    monitor="loss",
    shardings=rule,
    init=init,
    save_decision_policy=policies.FixedIntervalPolicy(2),
    preservation_policy=policies.PreserveAll(),
)
trainer = lightning.Trainer(
    strategy=TorchaxStrategy(),
    callbacks=[callback],
    max_steps=max_steps,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
handler = checkpoint._sigterm_action.__wrapped__().raw[:16]  # in C: the function and the mask
trainer.fit(
    module,
    StatefulDataLoader(
        Mine(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(INDEX)
    ),
)
assert callback.checkpointer is not None
report(
    is_sigterm_as_before=checkpoint._sigterm_action.__wrapped__().raw[:16] == handler,
    ranks=[trainer.global_rank, trainer.world_size],
    seen=module.seen,
    steps=callback.checkpointer.all_steps(),
    loss=callback.checkpointer.metrics(max_steps)["loss"],
    whole={
        name: digest(
            np.asarray(
                multihost_utils.process_allgather(torchax_backend.buffer(parameter), tiled=True)
            )
        )
        for name, parameter in module.named_parameters()
    },
)
