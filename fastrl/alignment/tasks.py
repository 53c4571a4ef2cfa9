"""The tasks: the data, responses and rewards of their batches."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.data.columns import ANSWERS, FEEDBACK, PAIRS, PROMPTS


@dataclass(frozen=True)
class Task:
    """A task, one of :data:`TASKS`.

    Attributes:
        data: the kind of examples that it needs, one of ``fastrl.data.columns.KINDS``.
        generations: responses per prompt in a batch.
        online: whether the policy generates the responses and an annotator judges them; else both
            come from the data.
        rewards: whether its batches have rewards.
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
    """Returns the task of a name, where hyphens and underscores are the same.

    Raises:
        ValueError: an unknown task.
    """
    if isinstance(task, Task):
        return task
    name = task.lower().replace("_", "-")
    if name not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]
