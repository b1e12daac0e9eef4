"""A small GPT on several hosts: tensor parallelism inside each, a pipeline across them.

python train.py HOSTS DEVICES FOLDER [STEPS]
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule, TextDataModule

if __name__ == "__main__":
    hosts, devices, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    pl.seed_everything(0)
    trainer = pl.Trainer(
        num_nodes=hosts,
        devices=devices,
        strategy=Hybrid3DStrategy(
            tensor_parallel_size=devices, pipeline_parallel_size=hosts, data_parallel_size=1
        ),
        max_steps=int(sys.argv[4]) if len(sys.argv) > 4 else 100,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=50)],
        val_check_interval=50,
        limit_val_batches=8,
    )
    data = TextDataModule(length=64, batch_size=8)
    trainer.fit(GPTModule(preset="tiny"), data, ckpt_path="last")  # there is none the first time
