"""A whole run with Lightning.

python run_lightning.py TASK.npz DIRECTORY
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from networks_torch import NETWORKS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from whole_run_marks import Marks
from whole_run_tasks import read

task, directory = read(sys.argv[1]), sys.argv[2]
train, valid, test = (
    TensorDataset(torch.tensor(x), torch.tensor(y).long()) for x, y in (task.train, task.valid, task.test)
)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = NETWORKS[task.name]()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def evaluate(self, batch, name):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())
        accuracy = (logits.argmax(-1) == batch[1]).float().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_accuracy": accuracy})

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), task.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, task.decay_steps, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


lightning.seed_everything(0)
model = Net()
marks = Marks(task, sum(parameter.numel() for parameter in model.parameters()))
trainer = lightning.Trainer(
    max_steps=task.steps,
    accelerator="cpu",
    val_check_interval=task.every,
    check_val_every_n_epoch=None,
    log_every_n_steps=task.log_every,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    logger=TensorBoardLogger(directory, name="tb"),
    callbacks=[
        marks.for_lightning(),
        ModelCheckpoint(directory + "/ckpt", every_n_train_steps=task.every, save_top_k=1, save_last=True),
        ModelCheckpoint(directory + "/best", monitor="val_loss", save_top_k=1),
        EarlyStopping("val_loss", patience=task.patience),
    ],
)
last = directory + "/ckpt/last.ckpt"
trainer.fit(
    model,
    DataLoader(train, task.batch_size, shuffle=True, drop_last=True),
    DataLoader(valid, task.eval_size),
    ckpt_path=last if os.path.exists(last) else None,
)
marks.test(trainer.test(model, DataLoader(test, task.eval_size), verbose=False)[0]["test_loss"])
