"""The learning tasks: what a batch holds, and where its responses and rewards come from."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.data.columns import ANSWERS, FEEDBACK, PAIRS, PROMPTS


@dataclass(frozen=True)
class Task:
    """A row of the table in :data:`TASKS`.

    Attributes:
        data: the kind of examples that it needs.
        generations: responses per prompt in a batch.
        online: the policy writes the responses and an annotator judges them; else the data do both.
        rewards: whether there are any.
    """

    name: str
    data: str
    generations: int
    online: bool
    rewards: bool


TASKS = {
    task.name: task
    for task in (
        Task("sft", ANSWERS, 1, online=False, rewards=False),
        Task("reward-modelling", PAIRS, 2, online=False, rewards=False),
        Task("reinforcement-learning", PROMPTS, 1, online=True, rewards=True),
        Task("offline-pointwise", FEEDBACK, 1, online=False, rewards=True),
        Task("online-pointwise", PROMPTS, 1, online=True, rewards=True),
        Task("offline-pairwise", PAIRS, 2, online=False, rewards=True),
        Task("online-pairwise", PROMPTS, 2, online=True, rewards=True),
    )
}


def find_task(task: str | Task) -> Task:
    """A task by its name; hyphens and underscores are the same.

    Raises:
        ValueError: no such task.
    """
    if isinstance(task, Task):
        return task
    name = task.lower().replace("_", "-")
    if name not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]
