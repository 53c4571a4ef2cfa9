"""patch_trl on stand-ins for TRL; tests/trl_parity has the real ones."""

import inspect
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fastrl
import fastrl.compat.patch
from fastrl.compat.patch import Calls
from tests import fake_trl

KINDS = ("modern", "classic")
HOMES = {"modern": "trl.trainer.utils", "classic": "trl.core"}


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastrl.unpatch_trl()


def state(modules: dict[str, ModuleType]) -> dict[str, list[tuple[str, int]]]:
    """What every name is bound to, in order, by identity; classes' own names too."""
    owners: dict[str, Any] = dict(modules)
    owners |= {
        f"{where}.{name}": value
        for where, module in modules.items()
        for name, value in vars(module).items()
        if inspect.isclass(value)
    }
    return {where: [(k, id(v)) for k, v in vars(o).items()] for where, o in owners.items()}


def test_fastrl_and_its_patch_import_without_transformers_and_trl():
    code = """
import sys
for name in ("transformers", "trl", "accelerate", "datasets"):
    sys.modules[name] = None  # an import of it fails
import fastrl
print(fastrl.config.__name__, fastrl.core.LengthSampler.__name__)  # without further imports
try:
    fastrl.patch_trl()
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    modules, error = result.stdout.splitlines()
    assert modules == "fastrl.config LengthSampler"
    assert "trl" in error
    assert result.stderr == ""


def test_every_public_name_is_there_and_no_other():
    for name in fastrl.__all__:
        assert getattr(fastrl, name) is not None
        assert name in dir(fastrl)
    assert fastrl.PPOTrainer.__module__ == "fastrl.trainers.ppo.trainer"
    assert fastrl.core.__name__ == "fastrl.core"
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainr'"):
        _ = fastrl.PPOTrainr


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_bound_to_a_replaced_object_is_rebound_and_reported(kind, monkeypatch):
    modules = fake_trl.install(monkeypatch, kind)
    before = {name: dict(vars(module)) for name, module in modules.items()}
    patch = fastrl.patch_trl()
    assert patch.version == {"modern": "1.16.3", "classic": "0.11.4"}[kind]
    changed = {
        f"{where}.{name}"
        for where, module in modules.items()
        for name, value in vars(module).items()
        if value is not before[where][name]
    }
    reported = {binding for replaced in patch.replaced for binding in replaced.bindings}
    if kind == "modern":
        assert changed == {
            "trl.kernels.ChunkedLogProbFunction",
            "trl.trainer.utils._ChunkedLogProbFunction",
            "trl.trainer.utils.selective_log_softmax",
            "trl.trainer.utils.entropy_from_logits",
            "trl.trainer.utils.selective_log_softmax_and_entropy",
            "trl.trainer.other.renamed",
        }
        assert reported == changed
    else:
        assert len(changed) == 10
        method = "trl.trainer.ppo_trainer.PPOTrainer.compute_advantages"
        assert reported == {*changed, method}
    for text in (*reported, patch.version, *(replaced.op for replaced in patch.replaced)):
        assert text in str(patch)


@pytest.mark.parametrize("kind", KINDS)
def test_undone_every_name_is_bound_as_before(kind, monkeypatch):
    modules = fake_trl.install(monkeypatch, kind)
    before = state(modules)
    fastrl.patch_trl()
    assert state(modules) != before
    fastrl.unpatch_trl()
    assert state(modules) == before
    fastrl.unpatch_trl()
    assert state(modules) == before


def test_modules_imported_later_follow_and_are_undone_too(monkeypatch):
    modules = fake_trl.install(monkeypatch, "modern")
    fastrl.patch_trl()
    late = ModuleType("trl.experimental")
    exec("from trl.trainer.utils import entropy_from_logits as entropy", vars(late))
    monkeypatch.setitem(sys.modules, late.__name__, late)
    assert late.entropy is modules["trl.trainer.utils"].entropy_from_logits
    assert late.entropy is not fake_trl.modern_entropy
    fastrl.unpatch_trl()
    assert late.entropy is fake_trl.modern_entropy


def test_a_name_that_somebody_else_rebound_is_left_alone(monkeypatch):
    modules = fake_trl.install(monkeypatch, "modern")
    fastrl.patch_trl()
    modules["trl.trainer.other"].renamed = "theirs"
    fastrl.unpatch_trl()
    assert modules["trl.trainer.other"].renamed == "theirs"


def test_modules_outside_trl_are_left_alone(monkeypatch):
    fake_trl.install(monkeypatch, "modern")
    mine = ModuleType("trlike")
    mine.name = fake_trl.selective_log_softmax
    monkeypatch.setitem(sys.modules, "trlike", mine)
    fastrl.patch_trl()
    assert mine.name is fake_trl.selective_log_softmax


def test_patching_twice_is_patching_once(monkeypatch):
    modules = fake_trl.install(monkeypatch, "modern")
    patch = fastrl.patch_trl()
    patched = state(modules)
    assert fastrl.patch_trl() is patch
    assert state(modules) == patched


def test_a_patch_can_be_a_context_even_when_it_ends_badly(monkeypatch):
    modules = fake_trl.install(monkeypatch, "modern")
    before = state(modules)
    with fastrl.patch_trl() as patch:
        assert patch.version == "1.16.3"
        assert state(modules) != before
    assert state(modules) == before
    with pytest.raises(ZeroDivisionError), fastrl.patch_trl():
        _ = 1 / 0
    assert state(modules) == before


@pytest.mark.parametrize("version", ["0.11.3", "0.11.40", "1.15.2", "1.17.0", "1.160"])
def test_another_version_is_refused_by_name(version, monkeypatch):
    modules = fake_trl.install(monkeypatch, "modern", {"trl": {"__version__": version}})
    before = state(modules)
    with pytest.raises(RuntimeError) as error:
        fastrl.patch_trl()
    for text in (f"TRL {version} is", "trl==0.11.4", "trl==1.16.*"):
        assert text in str(error.value)
    assert state(modules) == before


def other_signature(logits, index, temperature=2.0, row_mask=None):
    return fake_trl.selective_log_softmax(logits, index, temperature, row_mask)


def other_result(logits, index, temperature=1.0, row_mask=None):
    return fake_trl.selective_log_softmax(logits, index, temperature, row_mask) * 1.001


def other_dtype(logits, index, temperature=1.0, row_mask=None):
    return fake_trl.selective_log_softmax(logits, index, temperature, row_mask).double()


def other_gradient(logits, index, temperature=1.0, row_mask=None):
    x = fake_trl.selective_log_softmax(logits, index, temperature, row_mask)
    return 2 * x - x.detach()


def no_gradient(logits, index, temperature=1.0, row_mask=None):
    return fake_trl.selective_log_softmax(logits, index, temperature, row_mask).detach()


@pytest.mark.parametrize(("change", "message"), [
    (other_signature, "its parameters are logits, index, temperature=2.0"),
    (other_result, "results of check 0 differ"),
    (other_dtype, "results of check 0 differ"),
    (other_gradient, "gradients of check 0 differ"),
    (no_gradient, "check 0 differ"),
    (None, "it is not there"),
])  # fmt: skip
def test_a_trl_that_differs_is_left_untouched(change, message, monkeypatch):
    # The last but one to be checked: others have passed before.
    changes = {"trl.trainer.utils": {"selective_log_softmax": change}}
    modules = fake_trl.install(monkeypatch, "modern", changes)
    before = state(modules)
    with pytest.raises(RuntimeError, match=message) as error:
        fastrl.patch_trl()
    assert "trl.trainer.utils.selective_log_softmax" in str(error.value)
    assert "Nothing was changed" in str(error.value)
    assert state(modules) == before
    assert fastrl.compat.patch.call_counts() == {}


def test_a_method_that_differs_leaves_trl_untouched(monkeypatch):
    modules = fake_trl.install(monkeypatch, "classic")
    trainer = modules["trl.trainer.ppo_trainer"].PPOTrainer

    def biased(self, values, rewards, mask):
        values, advantages, returns = fake_trl.compute_advantages(self, values, rewards, mask)
        return values, advantages, returns + 0.01

    trainer.compute_advantages = biased
    before = state(modules)
    with pytest.raises(RuntimeError, match=r"PPOTrainer\.compute_advantages .* cannot be replaced"):
        fastrl.patch_trl()
    assert state(modules) == before


def test_an_interrupted_rebinding_is_taken_back(monkeypatch):
    modules = fake_trl.install(monkeypatch, "modern")
    before = state(modules)
    rebind, calls = fastrl.compat.patch.rebind, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(rebind(*arguments))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(fastrl.compat.patch, "rebind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fastrl.patch_trl()
    assert state(modules) == before
    assert fastrl.compat.patch.call_counts() == {}


def test_the_check_draws_no_random_number_and_is_not_counted(monkeypatch):
    fake_trl.install(monkeypatch, "modern")
    generator_state = torch.get_rng_state()
    patch = fastrl.patch_trl()
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert all(calls == Calls() for calls in patch.call_counts().values())


def test_calls_are_counted_by_replacement(monkeypatch):
    utils = fake_trl.install(monkeypatch, "modern")["trl.trainer.utils"]
    logits, index = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    patch = fastrl.patch_trl()
    for _ in range(3):
        utils.selective_log_softmax(logits, index)
    utils.selective_log_softmax(logits, index.unsqueeze(-1))
    expected = Calls(ours=3, delegated=1)
    assert patch.call_counts()["selective_log_softmax"] == expected
    assert fastrl.compat.patch.call_counts()["selective_log_softmax"] == expected
    assert patch.call_counts()["entropy_from_logits"] == Calls()
    fastrl.unpatch_trl()
    assert patch.call_counts()["selective_log_softmax"] == expected
    assert fastrl.compat.patch.call_counts() == {}
    assert fastrl.patch_trl().call_counts()["selective_log_softmax"] == Calls()


def test_advantages_need_no_gradients_to_be_ours(monkeypatch):
    module = fake_trl.install(monkeypatch, "classic")["trl.trainer.ppo_trainer"]
    trainer = module.PPOTrainer()
    trainer.config = SimpleNamespace(gamma=0.9, lam=0.8, whiten_rewards=True)
    g = torch.Generator().manual_seed(0)
    values, rewards = torch.randn(2, 3, 40, generator=g)
    mask = (torch.rand(3, 40, generator=g) < 0.7).long()
    expected = trainer.compute_advantages(values, rewards, mask)
    patch = fastrl.patch_trl()
    with torch.no_grad():
        found = trainer.compute_advantages(values, rewards, mask)
    trainer.compute_advantages(values, rewards, mask)
    assert patch.call_counts()["PPOTrainer.compute_advantages"] == Calls(ours=1, delegated=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
