"""ARCHITECTURE.md: the rooms, and journeys with the file and line of each stop.

`python -m tests.house --architecture` writes it; tests hold that it is what this file makes of the
sources, and that each journey's stops are entered in their order.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import ROOT, Function, Source

FILE = ROOT / "ARCHITECTURE.md"
_HEAD = """# Architecture

This page is written by `python -m tests.house --architecture`, from the READMEs of the rooms and
from the sources.

## Rooms

A room imports what stands below it in this list. `fastrl_kernels`, which all of them may import,
knows nothing of `fastrl`.
"""
# From the top to the bottom.
ROOMS = (
    *("tools", "compat", "alignment", "trainers", "collect", "learn", "rewards", "rollout"),
    *("data", "models", "run"),
)
_PPO, _LOOP = "fastrl.trainers.ppo.trainer.PPOTrainer", "fastrl.trainers.ppo.loop.Loop"
_GRPO = "fastrl.trainers.groups.grpo.GRPOTrainer"
_ONLINE = "fastrl.trainers.groups.online.OnlineTrainer"
_PREFERENCE = "fastrl.trainers.pairs.preference.PreferenceTrainer"
JOURNEYS = {
    "A reward through `PPOTrainer.step()`": (
        (f"{_PPO}.step", "the user gives prompts, responses and a score for each"),
        ("fastrl.trainers.ppo.step_input.StepInputs.__call__", "they become `Samples`, checked"),
        (f"{_PPO}._step", "the phases of a step, which read as the algorithm"),
        ("fastrl.learn.score_scaling.ScoreTransform.__call__", "the score is scaled and clipped"),
        ("fastrl.learn.scorer.Scorer.__call__", "policy and critic score the response's tokens"),
        ("fastrl.learn.ref_model.copy.SecondModel.score", "the reference model does, too"),
        (f"{_PPO}.compute_rewards", "tokens get their KL penalty, and the last one the score"),
        ("fastrl_kernels.kl.kl_rewards", "the formula of that"),
        ("fastrl.learn.advantages.GAE.__call__", "rewards and values become advantages"),
        ("fastrl.learn.update.Update.__call__", "epochs of mini-batches"),
        ("fastrl.learn.gradient.GradientStep.__call__", "a mini-batch, in passes that fit"),
        ("fastrl.learn.objective.TokenLoss.policy_objective", "the loss that a pass asks for"),
        ("fastrl_kernels.linear_ppo_loss.linear_ppo_loss", "from hidden states, without logits"),
        ("fastrl_kernels.ppo_loss.policy_terms", "the formula: the clipped surrogate"),
        ("fastrl.learn.engine.Engine.step", "the optimizer steps"),
    ),
    "A prompt through `fastrl grpo`": (
        ("fastrl.cli.main", "the command's name chooses a module"),
        ("fastrl.tools.commands.ppo.run_ppo", "flags become settings, and a run folder"),
        ("fastrl.tools.commands.ppo.load_prompts", "rows of a file become prompts"),
        ("fastrl.tools.commands.ppo.make_trainer", "the trainer is PPO's, with groups"),
        ("fastrl.data.prompts.Prompts.from_list", "a prompt is encoded"),
        (f"{_LOOP}.run", "the run, from its first evaluation to its end"),
        ("fastrl.trainers.driver.Driver.drive", "each step is learned, recorded, evaluated, saved"),
        ("fastrl.data.prompts.PromptStream.take", "the prompt's turn comes"),
        (f"{_LOOP}._step", "a step on some prompts, and what it logs"),
        ("fastrl.collect.collector.Collector.__call__", "responses are sampled and judged"),
        ("fastrl.rollout.engine.RolloutEngine.generate", "the policy samples a group of them"),
        ("fastrl.rollout.decode_step.DecodeStep.__call__", "a token is drawn"),
        ("fastrl.rewards.weighted.Rewards.__call__", "reward functions score each response"),
        (f"{_PPO}.step", "and the scores go on as above"),
    ),
    "A group through `GRPOTrainer`": (
        (f"{_ONLINE}.__init__", "model, reward functions, reference and data set"),
        ("fastrl.trainers.base.BaseTrainer.train", "transformers prepares the run, which resumes"),
        ("fastrl.trainers.driver.Driver.drive", "each step is learned, recorded, evaluated, saved"),
        (f"{_ONLINE}.training_step", "a batch of the responses; when all are used, new ones"),
        (f"{_ONLINE}._learnable", "responses with all that the loss needs to know of them"),
        ("fastrl.collect.collector.Collector.__call__", "responses are sampled and judged"),
        ("fastrl.trainers.groups.log_probs.ResponseScorer.reference", "log-probs by the reference"),
        (f"{_GRPO}.advantages_of", "rewards are compared within the group"),
        ("fastrl.learn.samples.minibatch_of", "what the loss reads, on the device"),
        (f"{_ONLINE}.compute_loss", "a pass's part of the loss"),
        ("fastrl.learn.objective.TokenLoss.in_one_pass", "the loss that the pass asks for"),
        ("fastrl.trainers.groups.log_probs.ResponseScorer.policy", "the model's forward pass"),
        ("fastrl_kernels.linear_ppo_loss.linear_ppo_loss", "from hidden states, without logits"),
        ("fastrl_kernels.ppo_loss.policy_terms", "the formula, of each token"),
        ("fastrl_kernels.kl.kl_value", "and that of the KL to the reference"),
    ),
    "A pair through `DPOTrainer`": (
        (f"{_PREFERENCE}.__init__", "model, reference and data set"),
        ("fastrl.trainers.pairs.dpo.DPOTrainer.prepare_rows", "rows become ids, once"),
        ("fastrl.data.encode.Encoder.together", "the one encoder: prompt and completion"),
        ("fastrl.trainers.base.BaseTrainer.train", "transformers prepares the run, which resumes"),
        ("fastrl.trainers.driver.Driver.drive", "each step is learned, recorded, evaluated, saved"),
        (f"{_PREFERENCE}.compute_loss", "a batch of pairs"),
        ("fastrl.trainers.pairs.dpo.DPOTrainer.losses", "both sides are scored, and compared"),
        (f"{_PREFERENCE}.score", "log-probs of the completions' tokens"),
        ("fastrl_kernels.linear_logprobs.linear_logprobs", "from hidden states, without logits"),
        (f"{_PREFERENCE}.ref_score", "the same by the reference model"),
        ("fastrl.learn.preferences.response_sums", "sums of tokens for each side"),
    ),
}


def page(source: Source) -> str:
    """The text of ARCHITECTURE.md."""
    return "\n".join([_HEAD, *_rooms(source.root), *_journeys(source)]) + "\n"


def _rooms(root: Path) -> Iterator[str]:
    for name in ROOMS:
        path = f"fastrl/{name}/README.md"
        title, _, text = (root / path).read_text(encoding="utf-8").partition("\n\n")
        assert title == f"# {name}", path
        yield f"- [`{name}/`]({path}): {' '.join(text.partition(chr(10) * 2)[0].split())}"
    yield ""


def _journeys(source: Source) -> Iterator[str]:
    for title, stops in JOURNEYS.items():
        yield f"## {title}\n"
        for number, (name, what) in enumerate(stops, 1):
            file, line = place(source, name)
            called = name.removeprefix(module_of(source, name) + ".")
            yield f"{number}. `{called}`, [{file}:{line}]({file}#L{line}): {what}."
        yield ""


def module_of(source: Source, name: str) -> str:
    """The module of a function or method, by its whole name."""
    while name not in source.modules:
        name = name.rpartition(".")[0]
    return name


def place(source: Source, name: str) -> tuple[str, int]:
    """File, below the root, and first line of a function or method, its decorators with it.

    Raises:
        KeyError: there is none of this name.
    """
    module = module_of(source, name)
    body: list[ast.stmt] = source.tree(module).body
    for part in name.removeprefix(module + ".").split("."):
        kinds = (*Function.__args__, ast.ClassDef)
        found = [x for x in body if isinstance(x, kinds) and x.name == part]
        if not found:
            raise KeyError(name)
        body, node = found[-1].body, found[-1]
    line = min([node.lineno, *(x.lineno for x in node.decorator_list)])
    return source.file(module), line
