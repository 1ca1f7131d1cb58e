"""A whole run with the Hugging Face Trainer.

python run_hf.py TASK.npz DIRECTORY
"""

import os
import sys

import torch
from networks_torch import NETWORKS
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint
from whole_run_marks import Marks
from whole_run_tasks import read
from whole_run_weights import to_torch

marks = Marks()
task, directory = read(sys.argv[1]), sys.argv[2]
marks.data(task)
if task.name == "mlp":
    torch.set_num_threads(1)  # two cost more than its small products take


class Examples(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = torch.tensor(x), torch.tensor(y).long()

    def __len__(self):
        return len(self.x)

    def __getitems__(self, rows):  # a batch is indexed at once, and needs no collator
        return {"x": self.x[rows], "labels": self.y[rows]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = NETWORKS[task.name]()

    def forward(self, x, labels):
        logits = self.net(x)
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()),
            "logits": logits,
        }


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return task.order.ravel().tolist()


set_seed(0)
model = Net()
to_torch(task, model.net)  # the weights of all marks
marks.init(sum(parameter.numel() for parameter in model.parameters()))
optimizer = torch.optim.AdamW(model.parameters(), task.rate, weight_decay=0.01, fused=True)
trainer = InOrder(
    model,
    TrainingArguments(
        directory,
        max_steps=task.steps,
        per_device_train_batch_size=task.batch_size,
        per_device_eval_batch_size=task.eval_size,
        eval_strategy="steps",
        eval_steps=task.every,
        save_steps=task.every,
        save_total_limit=2,
        logging_steps=task.log_every,
        metric_for_best_model="loss",
        max_grad_norm=1.0,
        report_to="tensorboard",
        label_names=["labels"],
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    ),
    data_collator=lambda batch: batch,
    train_dataset=Examples(*task.train),
    eval_dataset=Examples(*task.valid),
    compute_metrics=metrics,
    optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, task.decay_steps, 0.7)),
    callbacks=[marks.for_hf(), EarlyStoppingCallback(task.patience)],
)
trainer.train(
    resume_from_checkpoint=get_last_checkpoint(directory) if os.path.isdir(directory) else None
)
marks.test(trainer.evaluate(Examples(*task.test))["eval_loss"])
