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

task, directory = read(sys.argv[1]), sys.argv[2]


class Examples(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = torch.tensor(x), torch.tensor(y).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = NETWORKS[task.name]()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


set_seed(0)
model = Net()
marks = Marks(task, sum(parameter.numel() for parameter in model.parameters()))
optimizer = torch.optim.Adam(model.parameters(), task.rate)
trainer = Trainer(
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
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Examples(*task.train),
    eval_dataset=Examples(*task.valid),
    compute_metrics=metrics,
    optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, task.decay_steps, 0.7)),
    callbacks=[marks.for_hf(), EarlyStoppingCallback(task.patience)],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(directory) if os.path.isdir(directory) else None)
marks.test(trainer.evaluate(Examples(*task.test))["eval_loss"])
