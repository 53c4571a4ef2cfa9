"""How often the host waits for the device: in a step, in a rollout; and what is captured when."""

import pytest
import torch

from fastrl import PPOConfig, PPOTrainer, RolloutEngine, SamplingParams
from fastrl.data.prompts import PromptStream
from fastrl.rollout.kv_cache import KVCache
from fastrl.rollout.scheduler import Scheduler
from tests import tiny_models
from tests.device.pretended import DEVICE
from tests.device.test_iterations import MODES, PROMPTS, longest_word, trainer_for
from tests.golden import tiny
from tests.ppo.conftest import make_batch

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]

# Of a step beside those of its optimizer steps: its statistics, and where log-probs are reused the
# comparison with some that are computed again.
STATISTICS, AUDIT = 1, 1
# Of a rollout: whole numbers, and what belongs to tokens.
RESULTS = 2


def assert_waits(device, reads):
    assert device.count("upload") == 0, device.table()
    assert device.count("read") == reads, device.table()
    assert device.count("wait") <= 2, device.table()  # the clocks', when all is done


# transformers reads the mask of padded batches in each forward; an optimizer on the host all.
NOT_COUNTED = ("padded", "offloaded optimizer")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in NOT_COUNTED])
def test_a_step_reads_once_per_optimizer_step(device, mode):
    trainer = trainer_for(mode)
    trainer.step(**grouped(trainer, 0))  # what is found out once
    with device.watched():
        stats = trainer.step(**grouped(trainer, 1))
        assert stats["ppo/optimizer_steps"] == 4
        assert_waits(device, 4 + STATISTICS)


def grouped(trainer, seed):
    """A batch, whose responses lie in groups where the trainer has such."""
    batch, size = make_batch(8, seed), trainer.config.group_size
    batch["queries"] = [batch["queries"][i - i % size] for i in range(8)]
    return batch


@pytest.mark.parametrize("size", [1, 2, 4])
def test_mini_batches_are_not_read(device, size):
    settings = {"mini_batch_size": size, "gradient_accumulation_steps": 8 // size, "ppo_epochs": 1}
    trainer = trainer_for("copy", micro_batch_tokens=20, **settings)
    trainer.step(**grouped(trainer, 0))
    with device.watched():
        trainer.step(**grouped(trainer, 1))
        assert_waits(device, 1 + STATISTICS)


def test_what_lies_on_the_device_is_brought_to_the_host_in_one_transfer(device):
    trainer = trainer_for("copy")
    batch = {name: [x.to(DEVICE) for x in each] for name, each in grouped(trainer, 0).items()}
    masks = [torch.ones_like(x, dtype=torch.bool) for x in batch["responses"]]
    trainer.step(**batch, response_masks=masks)
    with device.watched():
        trainer.step(**batch, response_masks=masks)
        assert_waits(device, 4 + STATISTICS + 2)  # tokens with masks, and scores


@pytest.mark.parametrize("mode", ["copy", "trunk", "adapter", "GRPO", "bf16"])
def test_an_iteration_reads_what_its_parts_read(device, mode):
    trainer = trainer_for(mode)
    settings = {
        "prompts": tiny_models.prompts(*PROMPTS), "steps": 1, "progress": False,
        "generation_kwargs": {"max_new_tokens": 8},
    }  # fmt: skip
    trainer.train(longest_word, **settings)
    with device.watched():
        (numbers,) = trainer.train(longest_word, **settings).history
        # RLOO's rewards hold the KL: its old log-probs are computed again.
        assert numbers["rollout/reused"] == (0 if mode == "bf16" else 1)
        assert_waits(device, 4 + STATISTICS + AUDIT * numbers["rollout/reused"] + RESULTS)


LIMITS = [9, 2, 5, 7, 3, 6, 8, 4]
SAMPLED = SamplingParams(max_new_tokens=LIMITS, seed=0, suppress_tokens=[tiny.EOS])
GREEDY = SamplingParams(max_new_tokens=LIMITS, temperature=0, suppress_tokens=[tiny.EOS])
KINDS = {
    "sampled": SAMPLED,
    "greedy": GREEDY,
    "penalised": SamplingParams(max_new_tokens=LIMITS, seed=0, repetition_penalty=1.2),
    "stopped": SamplingParams(max_new_tokens=LIMITS, seed=0, stop=[[5, 6]]),
    "truncated": SamplingParams(max_new_tokens=LIMITS, seed=0, top_k=9, top_p=0.9),
}


def engine_of(slots=2, **options):
    model = tiny_models.policy("llama").to(DEVICE)
    return RolloutEngine(model, tiny.tokenizer(), slots, **options)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_slots_are_refilled_without_waiting(device, cuda_graphs):
    engine = engine_of(cuda_graphs=cuda_graphs)
    prompts = tiny_models.prompts(*PROMPTS)
    engine.generate(prompts[:1], SamplingParams())  # which finds out the shapes of its layers
    for params in KINDS.values():
        with device.watched():
            assert len(engine.generate(prompts, params).sequences) == 8
            assert device.count("wait") == 1 + engine._runner.stats.get("captures", 0)
            assert device.count("upload") == 0, device.table()
            assert device.count("read") == RESULTS, device.table()


def captures(engine, params, *lengths):
    return engine.generate(tiny_models.prompts(*lengths), params).stats["perf/graph_captures"]


def test_calls_of_other_kinds_keep_their_captured_steps(device):
    engine, plain = engine_of(), engine_of(cuda_graphs=False)
    prompts = tiny_models.prompts(*PROMPTS)
    for round_ in range(2):
        for name, params in KINDS.items():
            found, expected = engine.generate(prompts, params), plain.generate(prompts, params)
            assert (found.stats["perf/graph_captures"] == 0) == bool(round_), name
            assert list(map(list, found.sequences)) == list(map(list, expected.sequences))
            for one, other in zip(found.logprobs, expected.logprobs, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_only_the_last_kinds_of_calls_are_kept(device):
    engine = engine_of()
    for i in range(10):
        kind = SamplingParams(max_new_tokens=3, seed=0, temperature=1 + i / 100)
        assert captures(engine, kind, 4, 3) > 0
    assert captures(engine, kind, 4, 3) == 0
    assert len(engine._runner._kinds) <= 8
    assert len(engine._processors) <= 8


def test_a_longer_prompt_that_was_expected_needs_no_other_captured_steps(device):
    params = SamplingParams(max_new_tokens=2, seed=0)
    model = tiny_models.policy("llama", max_position_embeddings=256).to(DEVICE)
    engine = RolloutEngine(model, tiny.tokenizer(), 2)
    engine.expect(152)
    assert captures(engine, params, 5, 3) > 0
    assert captures(engine, params, 150, 100) == 0
    assert captures(engine, params, 151, 3) == 0


def test_a_run_captures_its_steps_once_though_prompts_become_longer(device):
    model = tiny_models.policy("llama", max_position_embeddings=256)
    config = PPOConfig(batch_size=2, mini_batch_size=2, ppo_epochs=1, rollout_slots=2)
    trainer = PPOTrainer(config, model, None, tiny.tokenizer())
    order, lengths = PromptStream(6, config.seed).take(6), [0] * 6
    for place, length in zip(order, (3, 2, 80, 5, 150, 100), strict=True):
        lengths[place] = length
    result = trainer.train(
        longest_word,
        prompts=tiny_models.prompts(*lengths),
        steps=3,
        progress=False,
        generation_kwargs={"max_new_tokens": 8},
    )
    captured = sum(step["perf/graph_captures"] for step in result.history)
    assert 0 < captured <= 2, "of two rows and of one"


def test_samples_change_their_slots_only_where_fewer_rows_are_run(device, monkeypatch):
    moved, rows = [], []
    move, pack = KVCache.move, Scheduler.pack
    monkeypatch.setattr(KVCache, "move", lambda *args: (moved.append(rows[-1]), move(*args)))

    def packed(self):
        before = self.bucket
        moves = pack(self)
        rows.append((before, self.bucket, len(moves)))
        return moves

    monkeypatch.setattr(Scheduler, "pack", packed)
    engine = engine_of(slots=8)
    limits = [9, 2, 12, 7, 3, 16, 8, 4, 5, 6, 11, 20]
    params = SamplingParams(max_new_tokens=limits, seed=0, suppress_tokens=[tiny.EOS])
    engine.generate(tiny_models.prompts(*[3] * 12), params)
    assert moved
    assert all(after < before for before, after, moves in rows if moves)
    # All samples of a smaller bucket move together.
    assert len(moved) == sum(moves > 0 for *_, moves in rows)
