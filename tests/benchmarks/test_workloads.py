"""Rollouts and reference models: what they measure, and gates that can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import environments, test_ref_model, test_rollout, timing
from benchmarks.cases import OURS, Case, faster, rooflines
from benchmarks.environments import Uninstallable
from benchmarks.harness import Measurement, Red, Run, own_accelerate
from benchmarks.models import EXACT, TOY_QWEN35, Model, build
from benchmarks.sides import __main__ as script
from benchmarks.sides import rollout
from benchmarks.sides.rollout import Generated, RolloutSide, Workload, workload
from benchmarks.test_ref_model import CHECKPOINTING, COPY, HALF, MODES, Stepping
from benchmarks.test_rollout import CONTINUOUS, GENERATE, STATIC, VLLM, RolloutJob
from benchmarks.worker import Absent, WorkerError
from tests.patience import PATIENCE

CPU = torch.device("cpu")


def an_entry(module, job) -> dict:
    """What a module's measurement of a job comes to, red or not."""
    measurement = Measurement(Run(CPU, rounds=2), Case("toy", "toy", "toy", of=job))
    with contextlib.suppress(Red):
        module.measure(measurement, job)
    return measurement.entry


TINY = Model("tiny", "gpt2", 1, 16, 2, 2, 32, 101, 32, "fp32")
JOB = RolloutJob(TINY, 5, 2, (1, 4), 4, 6, 1.0)


class InThisProcess:
    """A worker whose side runs here, on the library of this environment."""

    def __init__(self, python: Path, library: str, kind: str, shape: dict, *_: str, **options: str):
        self.implementation, self.options = library, options
        if not (why := script.why_absent(options)):
            self.side = RolloutSide(importlib.import_module(library), shape, **options)
        self.why = why

    def ready(self) -> dict[str, str]:
        if self.why:
            raise Absent(self.why)
        return {"torch": "2"}

    def ask(self, command: str) -> dict:
        return json.loads(json.dumps(getattr(self.side, command)()))

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if manager := getattr(getattr(self, "side", None), "generator", None):
            getattr(manager, "manager", SimpleNamespace(stop=lambda **_: None)).stop(
                timeout=PATIENCE, hard_stop=True
            )


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copy_speed", lambda device: 1e9)
    monkeypatch.setattr(test_rollout, "Worker", InThisProcess)

    def no_room(peer: str) -> Path:
        raise Uninstallable("no room for it")

    monkeypatch.setattr(environments, "peer_python", no_room)


def test_every_side_of_a_rollout_is_measured() -> None:
    entry = an_entry(test_rollout, JOB)
    assert not entry["red"]
    assert set(entry["sides"]) == {OURS, GENERATE, CONTINUOUS}
    assert STATIC in entry["absent"]
    assert entry["absent"][VLLM] == "no room for it"
    assert entry["units"] == ["tokens", sum(workload(JOB.shape).limits)]
    ours = entry["sides"][OURS]
    assert {phase: len(s) for phase, s in ours["seconds"].items()} == dict.fromkeys(
        ("rollout", "prefill", "decode", "decode step"), 2
    )
    assert rooflines(entry)[0] == ours["limit"][0] / ours["seconds"]["decode"][0]
    assert not entry["sides"][GENERATE]["limit"], "its decode steps are not known"
    for side in entry["sides"].values():
        assert side["facts"]["start-up [s]"] >= side["facts"]["loading and set-up [s]"] > 0
        assert side["memory"]["peak"] > 2**20
    for name in (OURS, CONTINUOUS):
        assert entry["sides"][name]["facts"]["largest |Δ log-prob|"] <= EXACT


def test_the_limit_of_a_decode_step_is_what_takes_longer_of_bytes_and_products(monkeypatch) -> None:
    """A slow copy takes longer than the products of this tiny model, a quick one less."""
    monkeypatch.setattr(timing, "copy_speed", lambda device: 1e3)
    slow = an_entry(test_rollout, JOB)["sides"][OURS]
    nbytes = slow["facts"]["weight bytes"] + slow["facts"]["live bytes per step"]
    assert slow["limit"] == pytest.approx([nbytes * slow["facts"]["decode steps"] / 1e3] * 2)
    monkeypatch.setattr(timing, "copy_speed", lambda device: 1e30)
    entry = an_entry(test_rollout, JOB)
    assert all(limit > 1e-9 for limit in entry["sides"][OURS]["limit"])
    products = {roof["product"] for roof in entry["roofs"]}
    assert products == {"2×16 · 16×48", "2×16 · 16×16", "2×16 · 16×32", "2×32 · 32×16",
                        "2×16 · 16×101"}  # fmt: skip


def _tokens(made: Generated) -> Generated:
    return made._replace(sequences=[[(x + 1) % TINY.vocabulary for x in y] for y in made.sequences])


def _logprobs(delta: float) -> Callable[[Generated], Generated]:
    def moved(made: Generated) -> Generated:
        return made._replace(logprobs=[[x + delta for x in y] for y in made.logprobs])

    return moved


WRONG = [
    (_tokens, "greedy tokens of prompt 0"),
    (_logprobs(2e-5), "log-probs are off"),
    (_logprobs(float("nan")), "log-probs are off by nan"),
]


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_wrong_tokens_or_log_probs_have_no_figures(change, says, monkeypatch) -> None:
    honest = rollout.Engine.__call__
    monkeypatch.setattr(rollout.Engine, "__call__", lambda *a, **k: change(honest(*a, **k)))
    entry = an_entry(test_rollout, JOB)
    assert says in entry["red"]
    assert not entry["sides"]


@pytest.mark.parametrize("way", [rollout.Engine, rollout.Transformers])
def test_fewer_tokens_than_asked_for_have_no_figures(way: type, monkeypatch) -> None:
    honest = way.__call__

    def fewer(self, work: Workload, greedy: bool = False) -> Generated:
        made = honest(self, work, greedy)
        return made if greedy else made._replace(sequences=[x[:-1] for x in made.sequences])

    monkeypatch.setattr(way, "__call__", fewer)
    entry = an_entry(test_rollout, JOB)
    why = entry["red"] if way is rollout.Engine else entry["absent"][GENERATE]
    assert "sample 0 has" in why


@pytest.mark.parametrize(("change", "says"), [*WRONG[:1], (_logprobs(2e-3), "log-probs are off")])
def test_a_peer_that_is_wrong_is_absent_and_says_why(change, says, monkeypatch) -> None:
    honest = rollout.Continuous.__call__
    monkeypatch.setattr(rollout.Continuous, "__call__", lambda *a, **k: change(honest(*a, **k)))
    entry = an_entry(test_rollout, JOB)
    assert set(entry["sides"]) == {OURS, GENERATE}
    assert says in entry["absent"][CONTINUOUS]


def test_a_peers_log_probs_may_be_less_exact_than_ours(monkeypatch) -> None:
    honest = rollout.Continuous.__call__
    moved = _logprobs(2e-5)
    monkeypatch.setattr(rollout.Continuous, "__call__", lambda *a, **k: moved(honest(*a, **k)))
    entry = an_entry(test_rollout, JOB)
    assert entry["sides"][CONTINUOUS]["facts"]["mean |Δ log-prob|"] == pytest.approx(2e-5, rel=0.1)


def test_a_peer_whose_process_ends_says_its_last_words() -> None:
    error = WorkerError("the vllm worker ended:\nloading\nRuntimeError: no kernels\n")
    assert test_rollout.why_absent(error) == "RuntimeError: no kernels"


def test_vllm_draws_from_the_whole_softmax_without_prefixes_and_with_log_probs(tmp_path) -> None:
    """Its interface, as far as the side asks for it."""
    asked: dict = {}

    class LLM:
        llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=2**31))
        )

        def __init__(self, folder: str, **options: object) -> None:
            asked.update(options, folder=folder)

        def generate(self, prompts, params, use_tqdm):
            asked["params"] = params
            made = [[5 + i] * one.max_tokens for i, one in enumerate(params)]
            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(
                            token_ids=ids,
                            logprobs=[{5 + i: SimpleNamespace(logprob=-1.0 - i)} for _ in ids],
                        )
                    ]
                )
                for i, ids in enumerate(made)
            ]

    library = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    side = RolloutSide(library, JOB.shape, str(tmp_path), "vllm")
    found = side.check()
    assert [len(ids) for ids in found["sequences"]] == workload(JOB.shape).limits
    assert found["logprobs"][1][0] == -2.0
    assert asked["enable_prefix_caching"] is False
    assert (asked["dtype"], asked["max_num_seqs"]) == ("float32", JOB.slots)
    (one, *_) = asked["params"]
    assert (one.temperature, one.logprobs, one.ignore_eos) == (1.0, 0, True)
    assert one.min_tokens == one.max_tokens
    assert "2 GiB are reserved" in found["note"]
    side.greedy()
    assert asked["params"][0].temperature == 0.0


def test_every_side_makes_what_generate_makes_alone(tmp_path) -> None:
    gate = test_rollout.Gate.of(JOB, CPU, tmp_path)
    assert [len(x) for x in gate.expected] == gate.short.limits
    for name in (GENERATE, CONTINUOUS):
        with test_rollout.start(name, JOB, gate.folders[0], CPU) as worker:
            found = worker.ask("greedy")["sequences"]
        assert test_rollout.differing(gate.model, gate.short, found, gate.expected) is None
    wrong = [*found[:2], found[2][::-1]]
    assert "prompt 2" in test_rollout.differing(gate.model, gate.short, wrong, gate.expected)


@pytest.mark.parametrize(("gap", "tied"), [(0.0, True), (1e-5, True), (1e-3, False)])
def test_what_follows_two_likeliest_tokens_is_not_compared(gap: float, tied: bool) -> None:
    class Model:
        device = CPU

        def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
            assert ids.tolist() == [[7, 1]], "the prompt, and what both have"
            return SimpleNamespace(logits=torch.tensor([[[0.0, 0.0, 3.0, 3.0 - gap]]]))

    work = Workload([torch.tensor([7])], [3])
    expected = [torch.tensor([1, 2, 0])]
    differing = test_rollout.differing
    for found in ([1, 3, 1], [1, 3, 2]):
        assert (differing(Model(), work, [found], expected) is None) == tied
    assert differing(Model(), work, [[1, 1, 0]], expected)
    assert differing(Model(), work, [[1, 2]], expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_less_precise_model_is_audited_by_its_own_rounding(dtype: str, tmp_path: Path) -> None:
    model = dataclasses.replace(TINY, family="qwen2", kv_heads=1, dtype=dtype)
    job = dataclasses.replace(JOB, model=model)
    gate = test_rollout.Gate.of(job, CPU, tmp_path)
    assert (gate.exact is gate.model) == (dtype == "fp32")
    with test_rollout.start(OURS, job, gate.folders[0], CPU) as worker:
        found = worker.ask("check")
    assert test_rollout.audit(gate.model, gate.exact, dtype, gate.work, found)[-1] is None
    found["logprobs"][0][0] += 0.02
    facts, wrong = test_rollout.audit(gate.model, gate.exact, dtype, gate.work, found)
    assert facts["largest |Δ log-prob|"] == pytest.approx(0.02, rel=0.05)
    assert wrong is not None
    found["logprobs"][0] = [x + 0.1 for x in found["logprobs"][0]]
    assert test_rollout.audit(gate.model, gate.exact, dtype, gate.work, found)[-1] is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rollouts_fit_their_model_and_have_labels_of_their_own(device: str) -> None:
    found = test_rollout.cases(Run(torch.device(device), full=True))
    assert len({str(case) for case in found}) == len(found)
    for case in found:
        work = workload(case.of.shape)
        limits = work.limits
        assert len(limits) == len(work.prompts) == case.of.prompts * case.of.group
        assert case.of.prompt[1] + max(limits) <= case.of.model.context
        assert limits == workload(case.of.shape).limits, "the same every time"


def test_bytes_of_a_step_are_those_that_it_cannot_but_read() -> None:
    # 1 layer of width 16 with its 32 inside; three norms; the head, which is the input's table too
    layer = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16)
    built = build(TINY, CPU)
    assert test_rollout.weight_bytes(built) == 4 * (layer + 3 * 32 + 101 * 16)
    work = Workload([torch.zeros(3), torch.zeros(1)], [2, 1])
    # keys and values of 16 numbers in fp32: of 3 + 4 tokens, and of 1
    assert test_rollout.kv_bytes(JOB, work) == 2 * 16 * 4 * (3 + 4 + 1)
    grouped = dataclasses.replace(TINY, kv_heads=1, dtype="bf16", layers=2)
    job = dataclasses.replace(JOB, model=grouped)
    assert test_rollout.kv_bytes(job, work) == 2 * 2 * 8 * 2 * (3 + 4 + 1)
    hybrid = dataclasses.replace(JOB, model=TOY_QWEN35)
    config = build(TOY_QWEN35, CPU).config
    state = config.linear_num_value_heads * config.linear_key_head_dim
    state *= config.linear_value_head_dim
    keys = 2 * config.num_key_value_heads * config.head_dim
    # One of four layers attends; three tokens read and write the states of the others.
    assert test_rollout.kv_bytes(hybrid, work) == 4 * (keys * (3 + 4 + 1) + 3 * state * 2 * 3)


((_, REF_CASE),) = enumerate(test_ref_model.cases(Run(CPU, toy=True)))
REF = REF_CASE.of
WIDTH, LAYERS, VOCABULARY = REF.model.width, REF.model.layers, REF.model.vocabulary


@pytest.fixture(scope="module")
def measured() -> dict:
    pytest.importorskip("peft")
    return an_entry(test_ref_model, REF)


def test_every_way_of_keeping_the_reference_is_measured_beside_a_copy(measured: dict) -> None:
    assert set(measured["sides"]) == {*MODES, COPY + CHECKPOINTING, HALF + CHECKPOINTING}
    assert measured["baseline"] == COPY
    for name, side in measured["sides"].items():
        assert {p: len(s) for p, s in side["seconds"].items()} == {"update": 2, "scores": 2}
        assert ("largest |Δ|" in side["facts"]) == (CHECKPOINTING in name or name != "none")
    copy, half = (measured["sides"][n]["seconds"]["update"] for n in (COPY, HALF))
    assert faster(measured, HALF) == [a / b for a, b in zip(copy, half, strict=True)]


def test_weights_are_counted_once_where_policy_and_reference_share_them(measured: dict) -> None:
    bytes_ = {name: side["memory"]["weights"] for name, side in measured["sides"].items()}
    layer = (WIDTH * 48 + 48) + (WIDTH * WIDTH + WIDTH) + (WIDTH * 32 + 32) + (32 * WIDTH + WIDTH)
    layer += 4 * WIDTH  # two norms
    embeddings = (VOCABULARY + 64) * WIDTH
    model = 4 * (LAYERS * layer + embeddings + 2 * WIDTH + VOCABULARY * WIDTH + WIDTH + 1)
    assert bytes_["none"] == model
    assert bytes_[COPY] == bytes_["offload"] == 2 * model
    for name, share in (("trunk 1/4", 1), (HALF, 2), ("trunk 3/4", 3)):
        assert bytes_[name] == 2 * model - 4 * (share * layer + embeddings)
    adapter = 4 * LAYERS * 8 * ((WIDTH + 48) + (WIDTH + WIDTH))
    assert bytes_["adapter"] == model + adapter


def test_an_update_needs_less_with_a_trunk_and_less_with_checkpointing(measured: dict) -> None:
    peaks = {name: side["memory"]["peak"] for name, side in measured["sides"].items()}
    assert peaks["trunk 3/4"] < peaks[HALF] < peaks["trunk 1/4"] < peaks[COPY]
    assert peaks[COPY + CHECKPOINTING] < peaks[COPY]
    assert peaks[HALF + CHECKPOINTING] < peaks[HALF]
    data = test_ref_model.samples(REF)
    tokens = sum(len(x) for x in (*data.queries, *data.responses))
    for name, side in measured["sides"].items():
        kept = side["memory"].get("trunk activations", 0)
        assert kept == (4 * tokens * WIDTH if name.startswith("trunk") else 0)


def test_activations_that_are_run_again_show_no_figures(monkeypatch) -> None:
    honest = test_ref_model.PPOConfig
    small = {"trunk_cache_gib": 0.0, "trunk_cache_host_gib": 0.0}
    monkeypatch.setattr(test_ref_model, "PPOConfig", lambda **k: honest(**k, **small))
    red = an_entry(test_ref_model, REF)["red"]
    assert red == "trunk 1/4: activations of 4 samples were not kept"


def _class_of(mode: str) -> type:
    """Of what keeps a reference so."""
    with own_accelerate():
        return type(test_ref_model.trainer(REF, MODES[mode], CPU).reference)


def _off(monkeypatch) -> None:
    kind = _class_of(COPY)
    honest = kind.score

    def score(self, inputs, request):
        scored = honest(self, inputs, request)
        return scored._replace(logprobs=scored.logprobs + 2e-5)

    monkeypatch.setattr(kind, "score", score)


def _policy_in_place_of_its_copy(monkeypatch) -> None:
    def score(self, inputs, request):
        with torch.no_grad():
            return self._policy(**inputs, scoring=request)

    monkeypatch.setattr(_class_of(COPY), "score", score)


def _adapter_left_on(monkeypatch) -> None:
    instead = lambda self: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(_class_of("adapter"), "_switched", instead)


def _there_is_one(monkeypatch) -> None:
    kind = _class_of("none")
    honest = kind.score

    def score(self, inputs, request):
        unknown = honest(self, inputs, request)
        return unknown._replace(logprobs=unknown.logprobs.nan_to_num())

    monkeypatch.setattr(kind, "score", score)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (_off, "copy: reference log-probs are off by 2."),
        (_policy_in_place_of_its_copy, "copy: reference log-probs are off by"),
        (_adapter_left_on, "adapter: reference log-probs are off by"),
        (_there_is_one, "log-probs, though there is no reference"),
    ],
)
def test_a_reference_that_is_another_model_is_red(break_it, says: str, monkeypatch) -> None:
    pytest.importorskip("peft")
    break_it(monkeypatch)
    _, red = test_ref_model.judge(REF, CPU)
    assert says in red


def test_a_reference_that_is_kept_otherwise_is_red() -> None:
    with own_accelerate():
        made = test_ref_model.trainer(REF, MODES[HALF], CPU)
    another = test_ref_model.another_mode
    assert another(made, MODES[HALF], LAYERS) is None
    assert "it shares 2 layers, not 1" in another(made, MODES["trunk 1/4"], LAYERS)
    assert "the reference is kept as trunk" in another(made, MODES[COPY], LAYERS)


def test_the_gate_moves_all_that_is_trained_and_nothing_else() -> None:
    data = test_ref_model.samples(REF)
    plain = test_ref_model.copy_logprobs(REF, data, CPU)
    with own_accelerate():
        side = Stepping(test_ref_model.trainer(REF, MODES[HALF], CPU), data)
        torch.testing.assert_close(side.reference_logprobs(), plain, rtol=0, atol=1e-5)
        before = [p.detach().clone() for p in side.trainer.model.parameters()]
        test_ref_model.move(side.trainer.model)
        for parameter, was in zip(side.trainer.model.parameters(), before, strict=True):
            moved = (parameter - was).abs().max().item()
            assert (moved > 1e-3) == parameter.requires_grad
            assert moved == 0 or parameter.requires_grad
