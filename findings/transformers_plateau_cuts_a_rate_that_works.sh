#!/usr/bin/env bash
# transformers' Trainer makes reduce_lr_on_plateau (and "greedy") for a metric that is to fall, also
# with metric_for_best_model="accuracy" and greater_is_better=True: the learning rate is cut at each
# evaluation that is better than the one before, while the best checkpoint is chosen the right way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy
env/bin/python - <<'PYTHON'
import itertools

import torch
import transformers
from transformers import Trainer, TrainingArguments

print("transformers", transformers.__version__, "torch", torch.__version__)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


rows = [{"x": [1.0], "labels": [2.0]}] * 4
accuracy = itertools.count(1)
args = TrainingArguments(
    "run", use_cpu=True, report_to="none", max_steps=4, learning_rate=0.01, save_strategy="steps",
    save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
    lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0},
    metric_for_best_model="accuracy", greater_is_better=True, disable_tqdm=True,
)
trainer = Trainer(
    Model(), args, train_dataset=rows, eval_dataset=rows,
    compute_metrics=lambda _: {"accuracy": next(accuracy) / 10},
)
trainer.train()
found = [log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log]
rate = trainer.optimizer.param_groups[0]["lr"]
print("accuracies:", found, "learning rate behind them:", rate)
assert found == sorted(found) and trainer.state.best_metric == found[-1]
assert rate < 0.01, "the rate is kept while accuracy grows now"
PYTHON
