"""What runs between a trainer's step and its loss, and in a command.

`python journeys.py steps` and `python journeys.py command` print it as JSON, for the fastrl that
Python finds. Each takes a process of its own: what is imported or remembered is entered but once.
"""

import contextlib
import inspect
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from datasets import Dataset

import fastrl
import fastrl_kernels
from fastrl import cli
from tests.golden import tiny

_FASTRL = str(Path(inspect.getfile(fastrl)).parent)
_KERNELS = str(Path(inspect.getfile(fastrl_kernels)).parent)
# The kernels' functions of one formula each, without those that compute a head's logits first.
_FORMULA = re.compile(r"(?!linear_|_|check)(\w+_loss|loss_of)$")
_QUICK: dict[str, Any] = {
    "per_device_train_batch_size": 4, "max_steps": 1, "save_strategy": "no", "use_cpu": True,
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


@contextlib.contextmanager
def profiled(see: Callable[[FrameType], None]) -> Iterator[None]:
    """Context in which every Python function that is entered is shown, in all new threads, too."""

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            see(frame)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def to_the_formula(start: str, run: Callable[[], Any]) -> dict[str, Any]:
    """The frames of fastrl and the kernels from the function named ``start`` to that with the
    loss's formula, both counted, and their files."""
    found: list[list[CodeType]] = []

    def see(frame: FrameType) -> None:
        code = frame.f_code
        if found or not (_is_in(_KERNELS, code) and _FORMULA.match(code.co_name)):
            return
        stack, above = [], frame
        while above is not None:
            if _is_in(_FASTRL, above.f_code) or _is_in(_KERNELS, above.f_code):
                stack.append(above.f_code)
            above = above.f_back  # type: ignore[assignment]
        starts = [i for i, code in enumerate(stack) if code.co_name == start]
        if starts:
            found.append(stack[starts[-1] :: -1])

    with profiled(see):
        run()
    (stack,) = found
    files = {code.co_filename for code in stack}
    return {"frames": len(stack), "files": len(files), "path": list(map(_place, stack))}


def _place(code: CodeType) -> str:
    """File, line and name of a function, as "fastrl/trainers/ppo/trainer.py:311 step"."""
    package = Path(_FASTRL if _is_in(_FASTRL, code) else _KERNELS)
    file = Path(code.co_filename).relative_to(package.parent).as_posix()
    return f"{file}:{code.co_firstlineno} {code.co_name}"


def _is_in(folder: str, code: CodeType) -> bool:
    return code.co_filename.startswith(folder + os.sep)


def entered(run: Callable[[], Any]) -> dict[str, int]:
    """The functions of fastrl and the kernels that are entered, and their files; modules, lambdas
    and comprehensions are no functions."""
    codes = set()

    def see(frame: FrameType) -> None:
        code = frame.f_code
        if not code.co_name.startswith("<") and (_is_in(_FASTRL, code) or _is_in(_KERNELS, code)):
            codes.add(code)

    with profiled(see):
        run()
    return {"functions": len(codes), "files": len({code.co_filename for code in codes})}


def in_order(run: Callable[[], Any], places: list[tuple[str, int]]) -> list[int]:
    """Of the functions at these files and lines those that are entered, each behind the one before
    it; by their numbers.

    Args:
        places: files, whole, and first lines.
    """
    found: list[int] = []

    def see(frame: FrameType) -> None:
        code, following = frame.f_code, len(found)
        if following < len(places) and places[following] == (code.co_filename, code.co_firstlineno):
            found.append(following)

    with profiled(see):
        run()
    return found


def step_of_ppo() -> None:
    model = fastrl.AutoModelForCausalLMWithValueHead(tiny.language_model("gpt2"))
    config = fastrl.PPOConfig(batch_size=4, mini_batch_size=4, ppo_epochs=1)
    trainer = fastrl.PPOTrainer(config, model, None, tiny.tokenizer())
    queries, responses = ([torch.tensor([5, i, 7]) for i in range(k, k + 4)] for k in (10, 20))
    trainer.step(queries, responses, [torch.tensor(float(i)) for i in range(4)])


def step_of_grpo(folder: str, **settings: Any) -> None:
    settings |= {"num_generations": 4, "max_completion_length": 4}
    args = fastrl.GRPOConfig(folder, **settings, **_QUICK)
    _train(fastrl.GRPOTrainer, args, {"prompt": ["w5 w6"] * 4}, reward_funcs=_reward)


def step_of_dpo(folder: str) -> None:
    pairs = {"prompt": ["w5"] * 4, "chosen": [" w6 w7"] * 4, "rejected": [" w8"] * 4}
    _train(fastrl.DPOTrainer, fastrl.DPOConfig(folder, **_QUICK), pairs)


def _train(kind: Any, args: Any, rows: dict[str, Any], **kwargs: Any) -> None:
    model, data = tiny.language_model("gpt2"), Dataset.from_dict(rows)
    kwargs |= {"args": args, "train_dataset": data, "processing_class": tiny.tokenizer()}
    kind(model, **kwargs).train()


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def command(folder: Path) -> None:
    """One step of ``fastrl grpo``."""
    flags = {"model": "start", "dataset": "rows.jsonl", "reward": "reward.py:score"}
    flags |= {"steps": "1", "batch-size": "4", "mini-batch-size": "4", "output": "run"}
    flags |= {"group-size": "4", "max-new-tokens": "4", "eval-prompts": "0"}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    os.chdir(folder)
    if cli.main(["grpo", *words]):
        raise RuntimeError("fastrl grpo failed")


def prepared(folder: Path) -> Path:
    """The folder, with what the command is given."""
    tiny.language_model("gpt2").save_pretrained(folder / "start")
    tiny.tokenizer().save_pretrained(folder / "start")
    (folder / "rows.jsonl").write_text('{"prompt": "w5 w6"}\n' * 4)
    reward = "def score(completions, **_):\n    return [float(len(x)) for x in completions]\n"
    (folder / "reward.py").write_text(reward)
    return folder


def main(what: str) -> None:
    torch.manual_seed(0)
    start, found = os.getcwd(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        if what == "command":
            place = prepared(folder)
            found["fastrl grpo"] = entered(lambda: command(place))
            os.chdir(start)
        else:
            grpo, dpo = (
                (lambda: step_of_grpo(f"{folder}/grpo")),
                (lambda: step_of_dpo(f"{folder}/dpo")),
            )
            found["PPOTrainer.step"] = to_the_formula("step", step_of_ppo)
            found["GRPOTrainer.training_step"] = to_the_formula("training_step", grpo)
            found["DPOTrainer.training_step"] = to_the_formula("training_step", dpo)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
