"""Lightning on several processes: each Trainer sees one device, and JAX those of all."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.processes import run_processes

PROGRAM = """
    import sys, warnings
    from processes_program import COUNT, INDEX, MESH, Loader, P, digest, init, report, rule
    import jax, lightning, numpy as np, torch, torchax
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from torchax import interop
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchax_ckpt import policies, torchax_backend
    from torchax_ckpt.integrations.lightning import TorchaxCheckpoint, TorchaxStrategy

    directory, seed, max_steps = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])

    class Mine(torch.utils.data.Dataset):
        # What this process has of the data, with noise of its own.
        def __len__(self):
            return 20

        def __getitem__(self, i):
            rows = np.random.default_rng(100 * INDEX + i).standard_normal(8)
            return (rows + np.random.random()).astype(np.float32)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = torch.nn.Linear(8, 8)
            self.seen = []

            def loss(parameters, x):
                out = torch.func.functional_call(self.net, parameters, (x,))
                return ((out - x) ** 2).mean()

            self.gradients = interop.jax_jit(interop.jax_value_and_grad(loss))

        def training_step(self, batch, batch_idx):
            mine = np.asarray(interop.jax_view(batch))
            self.seen.append(digest(mine))
            whole = jax.make_array_from_process_local_data(
                NamedSharding(MESH, P("fsdp")), mine, (COUNT * len(mine), 8))
            parameters = dict(self.net.named_parameters())
            loss, gradients = self.gradients(parameters, interop.torch_view(whole))
            self.log("loss", loss)
            for name, parameter in parameters.items():
                parameter.grad = gradients[name]
            self.optimizers().step()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    with torch.device("meta"):
        module = Module()
    torch.manual_seed(seed + INDEX), np.random.seed(seed + INDEX)
    checkpoint = TorchaxCheckpoint(
        directory, monitor="loss", shardings=rule, init=init,
        save_decision_policy=policies.FixedIntervalPolicy(2),
        preservation_policy=policies.PreserveAll(),
    )
    trainer = lightning.Trainer(
        strategy=TorchaxStrategy(), callbacks=[checkpoint], max_steps=max_steps,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, StatefulDataLoader(
        Mine(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(INDEX)))
    report(
        ranks=[trainer.global_rank, trainer.world_size],
        seen=module.seen,
        steps=checkpoint.checkpointer.all_steps(),
        loss=checkpoint.checkpointer.metrics(max_steps)["loss"],
        whole={
            name: digest(np.asarray(multihost_utils.process_allgather(
                torchax_backend.buffer(parameter), tiled=True)))
            for name, parameter in module.named_parameters()
        },
    )
"""


def test_a_fit_on_two_processes_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    ends = [end for (end,) in run_processes(PROGRAM, 2, str(straight), "0", "8")]
    # After the fifth step an epoch ends, which gives the monitored loss.
    assert [end["steps"] for end in ends] == [[2, 4, 5, 6, 8]] * 2
    assert ends[0]["whole"] == ends[1]["whole"]
    assert not set(ends[0]["seen"]) & set(ends[1]["seen"])

    # From within the second epoch, of five batches each, in processes with other random state.
    shutil.copytree(straight / "6", resumed / "6")
    found = [end for (end,) in run_processes(PROGRAM, 2, str(resumed), "50", "8")]
    for there, here in zip(ends, found, strict=True):
        assert here == {**there, "seen": there["seen"][6:], "steps": [6, 8]}
        assert here["ranks"] == [0, 1]  # as Lightning sees it
