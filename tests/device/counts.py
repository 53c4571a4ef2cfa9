"""How often the host waits for a device, as numbers: ``python -m tests.device.counts``."""

import json

from fastrl import RolloutEngine
from tests import tiny_models
from tests.device.pretended import DEVICE, PretendedDevice, pretended_device
from tests.golden import tiny


def counts() -> dict[str, float]:
    """Of a PPO step on what a rollout generated, and of a rollout that refills its slots. Reads
    are of the host; waits are those of clocks, when all is done."""
    with pretended_device() as device:
        return {**_of_a_step(device), **_of_a_rollout(device)}


def _of_a_step(device: PretendedDevice) -> dict[str, float]:
    from tests.device.test_iterations import trained, trainer_for

    reads, uploads = [], []
    for size in (1, 2):  # samples of a mini-batch, of an optimizer step's four
        settings = {"mini_batch_size": size, "gradient_accumulation_steps": 4 // size}
        trainer = trainer_for("copy", **settings)
        trained(trainer)
        with device.watched():
            (step,) = trained(trainer).history
            reads.append(device.count("read"))
            uploads.append(device.count("upload"))
            of_the_update = sum(e.place.startswith("fastrl/learn/update") for e in device.events)
    steps = step["ppo/optimizer_steps"]
    more = 2 * steps  # mini-batches of the first
    return {
        "reads per optimizer step": of_the_update / steps,
        "reads per mini-batch": (reads[0] - reads[1]) / more,
        "blocking uploads per mini-batch": (uploads[0] - uploads[1]) / more,
        "reads per iteration, rollout and statistics included": reads[1],
        "blocking uploads per iteration": uploads[1],
    }


def _of_a_rollout(device: PretendedDevice) -> dict[str, float]:
    from tests.device.test_host_reads import GREEDY, SAMPLED
    from tests.device.test_iterations import PROMPTS

    model = tiny_models.policy("llama").to(DEVICE)
    engine = RolloutEngine(model, tiny.tokenizer(), 2)
    prompts = tiny_models.prompts(*PROMPTS)
    engine.generate(prompts, SAMPLED)
    engine.generate(prompts, GREEDY)
    captures = 0.0
    with device.watched():
        for params in (SAMPLED, GREEDY):
            captures += engine.generate(prompts, params).stats["perf/graph_captures"]
        reads, uploads = device.count("read"), device.count("upload")
    refills = len(prompts) - engine.max_slots
    return {
        "reads per rollout": reads / 2,
        "blocking uploads per refilled slot": uploads / 2 / refills,
        "captures where greedy and sampled calls alternate": captures,
    }


if __name__ == "__main__":
    print(json.dumps(counts(), indent=2))
