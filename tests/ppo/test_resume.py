"""A PPO run that was interrupted ends, bit for bit, as one that was not."""

import contextlib
import json
import os
import random
import signal
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, TrainCallback
from fastrl.core import set_seed
from fastrl.run import checkpoints, stopping
from fastrl.run.checkpoints import BadCheckpoint, Checkpoints
from fastrl.run.ledger import read_ledger
from fastrl.run.stopping import stop_at_a_steps_end
from fastrl.user_code import ExitCalled
from tests import tiny_models
from tests.bits import bits, differing
from tests.golden import tiny

TEXTS = [f"w{i} w{i + 1}" for i in range(3, 14)]
STEPS = 6
SETTINGS = {"batch_size": 4, "mini_batch_size": 2, "ppo_epochs": 2, "learning_rate": 1e-2}
LORA = tiny_models.lora()

CODE = "code or weights of"  # a function that fails once is another one

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{CODE}"),
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
]
VARIANTS = {
    "ppo": {},
    "scaled scores": {"use_score_scaling": True, "use_score_norm": True},
    "grpo": {"advantage": "grpo", "group_size": 2, "kl_in": "loss"},
    "a reference that follows": {"sync_ref_every": 2, "ref_ema": 0.5},
    "shared layers": {"family": "llama", "num_shared_layers": 1},
    "no reference": {"init_kl_coef": 0.0, "adap_kl_ctrl": False},
    "model.generate": {"rollout_backend": "generate"},
    "gradient accumulation": {"mini_batch_size": 1, "gradient_accumulation_steps": 2},
    "weights in bf16": {"dtype": torch.bfloat16},
    "an optimizer of transformers": {"optim": "adamw_torch", "optim_args": "weight_decay=0.1"},
    "an adapter": {"peft_config": LORA},
    "an adapter that was trained": {"peft_config": LORA, "reference_adapter": "start"},
    "an adapter that is followed": {
        "peft_config": LORA,
        "reference_adapter": "start",
        "sync_ref_every": 2,
        "ref_ema": 0.5,
    },
}


def make_trainer(
    family="gpt2",
    peft_config=None,
    scheduler=None,
    model=None,
    tokenizer=None,
    dtype=torch.float32,
    **settings,
):
    torch.manual_seed(0)
    policy = tiny_models.policy(family) if model is None else model
    if peft_config is not None:
        language_model = tiny_models.language_model()
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(
            language_model, peft_config=peft_config
        )
    policy.to(dtype)
    config = PPOConfig(**SETTINGS | settings)
    optimizer = None
    if scheduler is not None:
        weights = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)
        scheduler = scheduler(optimizer)
    return PPOTrainer(
        config,
        policy,
        None,
        tokenizer or tiny.tokenizer(),
        optimizer=optimizer,
        lr_scheduler=scheduler,
    )


def reward(completion_ids, **_):
    """Draws from every generator of the process, whose states must survive, too."""
    noise = random.random() + np.random.rand() + float(torch.rand(()))
    return [len(set(ids)) + noise for ids in completion_ids]


class Failing:
    """The same reward function, which fails in one call."""

    __name__ = "reward"

    def __init__(self, call):
        self.left = call

    def __call__(self, **columns):
        self.left -= 1
        rewards = reward(**columns)
        if not self.left:
            raise RuntimeError("the judge is gone")
        return rewards


def run(trainer, output, reward_fn=reward, **arguments):
    arguments = {"steps": STEPS, "save_every": 2, "eval_every": 3, "progress": False, **arguments}
    return trainer.train(
        reward_fn,
        prompts=TEXTS,
        eval_prompts=TEXTS[:2],
        output=output,
        **{"generation_kwargs": {"max_new_tokens": 5}, **arguments},
    )


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith(("time/", "perf/"))} for x in rows]


@contextlib.contextmanager
def failing():
    with (
        pytest.raises(RuntimeError, match="the judge is gone"),
        pytest.warns(UserWarning, match=r"after RuntimeError the state is saved in .*resume=True"),
    ):
        yield


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(variant, tmp_path):
    settings = VARIANTS[variant]
    straight = make_trainer(**settings)
    expected = run(straight, tmp_path / "straight")
    stopped = make_trainer(**settings)
    with failing():  # in step 4, two evaluations before it
        run(stopped, tmp_path / "run", Failing(4 + 2))
    assert stopped.current_step == 3
    resumed = make_trainer(**settings)
    set_seed(99)
    result = run(resumed, tmp_path / "run", resume=True)
    assert differing(bits(straight), bits(resumed)) == []
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert list(map(repr, map(asdict, result.evaluations))) == list(
        map(repr, map(asdict, expected.evaluations))
    )
    assert resumed.current_step == STEPS
    assert [len(x.history) for x in (expected, result)] == [STEPS, STEPS - 3]


@pytest.mark.parametrize("save_every", [2, 0])
def test_the_last_evaluation_is_made_up(save_every, tmp_path):
    options = {"eval_every": 0, "save_every": save_every}
    expected = run(make_trainer(), tmp_path / "straight", **options)
    with failing():  # two evaluations, and the steps between them
        run(make_trainer(), tmp_path / "run", Failing(STEPS + 2), **options)
    for _ in range(2):
        resumed = make_trainer()
        result = run(resumed, tmp_path / "run", resume=True, **options)
        assert result.history == []
        assert [x.rewards for x in result.evaluations] == [x.rewards for x in expected.evaluations]
        assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_evaluations_by_another_reward_are_not_compared(tmp_path):
    def longest(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    run(make_trainer(), tmp_path / "run", steps=3)
    with pytest.warns(UserWarning, match=r"differ .*reward: {'reward': 1.0} → {'longest': 1.0}"):
        result = run(make_trainer(), tmp_path / "run", longest, resume=True)
    assert [evaluation.step for evaluation in result.evaluations] == [3, 6]
    with pytest.warns(UserWarning, match=r"settings differ .*max_new_tokens: 5 → 4\)"):
        run(
            make_trainer(),
            tmp_path / "run",
            longest,
            resume=True,
            generation_kwargs={"max_new_tokens": 4},
        )


def test_evaluations_at_another_temperature_are_not_compared(tmp_path):
    run(make_trainer(), tmp_path / "run", steps=3)
    with pytest.warns(UserWarning, match=r"temperature: 1.0 → 0.5"):
        result = run(make_trainer(temperature=0.5), tmp_path / "run", resume=True)
    assert [evaluation.step for evaluation in result.evaluations] == [3, 6]


def test_another_reward_by_the_same_name_is_named(tmp_path):
    """It may be the same one, mended: what was evaluated before stays."""

    def of_length(by):
        def longest(completion_ids, **_):
            return [by * len(ids) for ids in completion_ids]

        return longest

    run(make_trainer(), tmp_path / "run", of_length(1.0), steps=3)
    with pytest.warns(UserWarning, match=f"differ .*{CODE} longest: "):
        result = run(make_trainer(), tmp_path / "run", of_length(2.0), resume=True)
    assert [evaluation.step for evaluation in result.evaluations] == [0, 3, 6]


def test_the_time_of_a_run_is_that_of_all_its_processes(tmp_path):
    first = run(make_trainer(), tmp_path / "run", steps=5)
    last = run(make_trainer(), tmp_path / "run", resume=True)
    steps = [row["time/step"] for row in first.history]
    assert first.seconds > sum(steps)
    assert last.seconds > sum(steps[:4])  # those of the last checkpoint, at least


def test_a_schedule_and_an_optimizer_of_ones_own_are_resumed(tmp_path):
    schedule = {"scheduler": lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=STEPS)}
    straight = make_trainer(**schedule)
    run(straight, tmp_path / "straight")
    with failing():
        run(make_trainer(**schedule), tmp_path / "run", Failing(4 + 2))
    resumed = make_trainer(**schedule)
    run(resumed, tmp_path / "run", resume=True)
    assert differing(bits(straight), bits(resumed)) == []


def test_a_loop_of_ones_own_is_saved_and_continued(tmp_path):
    def steps(trainer, count):
        for _ in range(count):
            queries = [torch.tensor([3, 4, 5 + i]) for i in range(4)]
            responses = trainer.generate(queries, return_prompt=False, max_new_tokens=5)
            trainer.step(queries, responses, [torch.rand(()) for _ in queries])

    straight = make_trainer()
    steps(straight, 4)
    stopped = make_trainer()
    steps(stopped, 2)
    path = stopped.save_checkpoint(tmp_path)
    assert path == tmp_path / "checkpoint-2"
    resumed = make_trainer()
    resumed.load_checkpoint(tmp_path)
    steps(resumed, 2)
    assert differing(bits(straight), bits(resumed)) == []


def test_a_run_that_ended_is_prolonged(tmp_path):
    straight = make_trainer()
    run(straight, tmp_path / "straight", eval_every=0)
    run(make_trainer(), tmp_path / "run", steps=3, eval_every=0)
    longer = make_trainer()
    assert run(longer, tmp_path / "run", eval_every=0, resume=True).history
    assert differing(bits(straight), bits(longer)) == []
    again = make_trainer()
    assert not run(again, tmp_path / "run", eval_every=0, resume=True).history
    assert differing(bits(straight), bits(again)) == []


def test_an_earlier_checkpoint_is_taken_by_name(tmp_path):
    straight = make_trainer()
    run(straight, tmp_path / "run", keep_last=0)
    other = make_trainer()
    run(other, tmp_path / "run", keep_last=0, resume=tmp_path / "run/checkpoints/checkpoint-2")
    assert differing(bits(straight), bits(other)) == []
    assert (tmp_path / "run" / "checkpoints.superseded-1" / "checkpoint-4").is_dir()
    third = make_trainer()
    run(third, tmp_path / "new", resume=tmp_path / "run/checkpoints/checkpoint-2")
    assert differing(bits(straight), bits(third)) == []
    assert [row["step"] for row in metrics(tmp_path / "new")] == [3, 3, 4, 5, 6, 6]


def test_another_runs_checkpoint_leaves_nothing_of_the_run_in_the_folder(tmp_path):
    run(make_trainer(), tmp_path / "other", steps=4)
    run(make_trainer(seed=7), tmp_path / "run", steps=4)
    checkpoint = tmp_path / "other" / "checkpoints" / "checkpoint-2"
    with pytest.warns(UserWarning, match="settings differ"):
        run(make_trainer(seed=7), tmp_path / "run", steps=4, resume=checkpoint)
    assert sorted(set(read_ledger(tmp_path / "run" / "ledger")["step"].to_pylist())) == [3, 4]
    kept = read_ledger(tmp_path / "run" / "ledger" / "superseded-1")
    assert sorted(set(kept["step"].to_pylist())) == [1, 2, 3, 4]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [3, 3, 4, 4]


def test_other_processes_must_have_as_many_samples():
    trainer = make_trainer()
    state = trainer.state_dict()
    state["processes"], state["random"] = 3, state["random"] * 3
    with pytest.warns(UserWarning, match=r"the run had 3 process\(es\), and has 1"):
        make_trainer().load_state_dict(state)
    state["config"]["batch_size"], before = 6, bits(trainer)
    message = (
        r"a step .* has 6 samples, and 1 process\(es\) with batch_size=4 have 4: start as many"
    )
    with pytest.raises(BadCheckpoint, match=message):
        trainer.load_state_dict(state)
    assert differing(before, bits(trainer)) == []


def test_resuming_before_there_is_a_checkpoint_begins(tmp_path):
    straight = make_trainer()
    run(straight, tmp_path / "straight")
    resumed = make_trainer()
    run(resumed, tmp_path / "run", resume=True)
    assert differing(bits(straight), bits(resumed)) == []


class Quitting(TrainCallback):
    def on_step(self, trainer, step, metrics):
        if step == 3:
            sys.exit()


@pytest.mark.filterwarnings("ignore:after ExitCalled the state is saved in")
@pytest.mark.parametrize("saved", [True, False])
def test_a_callback_does_not_end_the_program(saved, tmp_path):
    output = tmp_path / "run" if saved else None
    with pytest.raises(ExitCalled, match=r"sys\.exit\(None\)"):
        run(make_trainer(), output, callbacks=[Quitting()], **({} if saved else {"save_every": 0}))
    if saved:
        assert Checkpoints(output / "checkpoints").newest_good().name == "checkpoint-3"


class Signal(TrainCallback):
    def __init__(self, number, step):
        self.number, self.step = number, step

    def on_step(self, trainer, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), self.number)


@contextlib.contextmanager
def ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=int)
def test_a_signal_stops_the_run_at_the_steps_end(number, tmp_path, capsys):
    straight = make_trainer()
    run(straight, tmp_path / "straight")
    stopped = make_trainer()
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3; saved: ") as stop:
        run(stopped, tmp_path / "run", callbacks=[Signal(number, 3)])
    assert signal.getsignal(number) is before
    said = capsys.readouterr().err
    assert "stops as soon as it can save its state" in said
    if number == signal.SIGTERM:
        assert isinstance(stop.value, SystemExit)
        assert stop.value.code == 143
        assert f"fastrl: {stop.value}\n" in said
    else:
        assert type(stop.value) is KeyboardInterrupt  # any other kind would not end with 130
    assert stopped.current_step == 3
    resumed = make_trainer()
    run(resumed, tmp_path / "run", resume=True)
    assert differing(bits(straight), bits(resumed)) == []
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_an_ignored_signal_stays_ignored():
    with ignored(signal.SIGINT), stop_at_a_steps_end():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_a_second_ctrl_c_stops_at_once(tmp_path, capsys):
    twice = [Signal(signal.SIGTERM, 3), Signal(signal.SIGINT, 3)]
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; the newest checkpoint is .*-2: "):
        run(make_trainer(), tmp_path / "run", callbacks=twice)
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_good().name == "checkpoint-2"


def test_a_signal_during_a_save_stops_the_run_behind_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "write_manifest", interrupted(checkpoints.write_manifest))
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 2; saved: .*-2; --resume"):
        run(make_trainer(), tmp_path / "run")


def interrupted(write):
    """Writes as Ctrl-C is pressed."""

    def writes(*given):
        os.kill(os.getpid(), signal.SIGINT)
        write(*given)

    return writes


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=int)
def test_a_launcher_that_sends_a_signal_on_does_not_hasten_it(second, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "process_count", lambda: 2)
    twice = [Signal(signal.SIGINT, 3), Signal(second, 3)]
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3; saved: "):
        run(make_trainer(), tmp_path / "run", callbacks=twice)


def test_a_program_handles_signals_by_itself(tmp_path):
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("program"))
    try:
        run(make_trainer(), tmp_path / "run", steps=2, callbacks=[Signal(signal.SIGTERM, 1)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == ["program"]
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_good().name == "checkpoint-2"


class Late(TrainCallback):
    def on_train_end(self, trainer, result):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_behind_the_last_step_is_not_lost(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(make_trainer(), tmp_path / "run", steps=1, callbacks=[Late()])


def test_a_step_that_fails_within_its_update_is_not_saved(tmp_path, monkeypatch):
    trainer = make_trainer()
    real = trainer.optimizer.optimizer.step
    calls = []

    def step(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4 * 2 + 3:
            raise RuntimeError("no memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(trainer.optimizer.optimizer, "step", step)
    with (
        pytest.raises(RuntimeError, match="no memory"),
        pytest.warns(UserWarning, match=r"step 3 failed within its update.*is .*checkpoint-2"),
    ):
        run(trainer, tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_good().name == "checkpoint-2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    run(make_trainer(), folder, steps=2)
    return folder


def other_tokenizer():
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["new"])
    return tokenizer


@pytest.mark.parametrize(("trainer", "said"), [
    ({"model": lambda: tiny_models.policy("llama")}, "whose model differs .GPT2LMHeadModel, "),
    ({"model": lambda: tiny_models.policy(perturbation=0.05)},
     "whose reference differs: make the trainer"),
    ({"tokenizer": other_tokenizer}, "whose tokenizer differs: resume with the tokenizer"),
    ({"advantage": "grpo", "group_size": 2}, r"whose method differs \(PPO, here GRPO\)"),
    ({"init_kl_coef": 0.0, "adap_kl_ctrl": False}, "whose reference differs"),
    ({"optim": "sgd"}, "the checkpoint's run had optim='adam', this one has 'sgd'"),
    ({"optim_args": "beta2=0.5"}, "had optim_args=None, this one has 'beta2=0.5'"),
    ({"peft_config": LORA}, "whose (model differs|frozen weights differ|reference differs)"),
    ({"scheduler": lambda o: torch.optim.lr_scheduler.LinearLR(o)}, "run had no lr_scheduler"),
])  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(trainer, said, saved):
    made = {k: v() if k in ("model", "tokenizer") else v for k, v in trainer.items()}
    other = make_trainer(**made)
    before = bits(other)
    files = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(BadCheckpoint, match=said):
        run(other, saved, resume=True)
    assert differing(before, bits(other)) == []
    assert files == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


def test_a_run_on_other_prompts_is_refused(saved):
    trainer = make_trainer()
    before = bits(trainer)
    with pytest.raises(BadCheckpoint, match="learned from other prompts"):
        trainer.train(reward, steps=3, prompts=TEXTS[1:], output=saved, resume=True, progress=False)
    assert differing(before, bits(trainer)) == []


def test_settings_that_changed_are_named_and_a_new_learning_rate_is_used(saved):
    trainer = make_trainer(learning_rate=0.5)
    with pytest.warns(UserWarning, match=r"differ .* \(learning_rate: 0\.01 → 0\.5\)"):
        trainer.load_checkpoint(saved)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5


def test_a_reward_that_leaves_the_working_directory_takes_no_files_along(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def leaving(completions, **_):
        os.chdir(tmp_path / "elsewhere")
        return [float(len(text)) for text in completions]

    run(make_trainer(), "run", leaving)
    assert not any((tmp_path / "elsewhere").iterdir())
    assert Checkpoints(tmp_path / "run" / "checkpoints").paths()
