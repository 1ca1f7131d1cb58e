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
from whole_run_weights import to_torch

marks = Marks()
task, directory = read(sys.argv[1]), sys.argv[2]
marks.data(task)
if task.name == "mlp":
    torch.set_num_threads(1)  # two cost more than its small products take
train, valid, test = (
    TensorDataset(torch.tensor(x), torch.tensor(y).long())
    for x, y in (task.train, task.valid, task.test)
)


def loader(examples, rows):  # each element of `rows` is a batch, which is indexed at once
    return DataLoader(examples, batch_size=None, sampler=rows)


def in_order(examples):
    return loader(examples, torch.arange(len(examples)).split(task.eval_size))


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
        optimizer = torch.optim.AdamW(self.parameters(), task.rate, weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, task.decay_steps, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


lightning.seed_everything(0)
model = Net()
to_torch(task, model.net)  # the weights of all marks
marks.init(sum(parameter.numel() for parameter in model.parameters()))
trainer = lightning.Trainer(
    max_steps=task.steps,
    accelerator="cpu",
    val_check_interval=task.every,
    check_val_every_n_epoch=None,
    log_every_n_steps=task.log_every,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
    logger=TensorBoardLogger(directory, name="tb"),
    callbacks=[
        marks.for_lightning(),
        ModelCheckpoint(
            directory + "/ckpt", every_n_train_steps=task.every, save_top_k=1, save_last=True
        ),
        ModelCheckpoint(directory + "/best", monitor="val_loss", save_top_k=1),
        EarlyStopping("val_loss", patience=task.patience),
    ],
)
last = directory + "/ckpt/last.ckpt"
trainer.fit(
    model,
    loader(train, torch.tensor(task.order).long()),
    in_order(valid),
    ckpt_path=last if os.path.exists(last) else None,
)
marks.test(trainer.test(model, in_order(test), verbose=False)[0]["test_loss"])
