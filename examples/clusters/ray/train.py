"""Ray starts the workers, and again after a failure; the strategy divides the model among them.

python train.py WORKERS FOLDER [STEPS]
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import ray
import ray.train
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchConfig, TorchTrainer

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule, TextDataModule


def train(config: dict) -> None:
    """Train on one worker; Ray calls it on each."""
    folder, context = Path(config["folder"]), ray.train.get_context()
    devices = context.get_local_world_size()
    hosts = context.get_world_size() // devices
    pl.seed_everything(0)
    trainer = pl.Trainer(
        num_nodes=hosts,
        devices=devices,
        strategy=Hybrid3DStrategy(
            tensor_parallel_size=devices, pipeline_parallel_size=hosts, data_parallel_size=1
        ),
        plugins=[RayLightningEnvironment()],
        max_steps=config["steps"],
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=5)],
        limit_val_batches=0,
    )
    data = TextDataModule(length=64, batch_size=8)
    trainer.fit(GPTModule(preset="tiny"), data, ckpt_path="last")  # there is none the first time


if __name__ == "__main__":
    workers, folder = int(sys.argv[1]), str(Path(sys.argv[2]).absolute())
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    ray.init()
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "steps": steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
    ).fit()
