"""The Python around a kernel's launch: little, and it launches what Triton itself would."""

from __future__ import annotations

import pytest
import torch

from benchmarks.python_time import python_work
from fastrl_kernels import dispatch
from tests.kernels.test_import import python

# Functions, of Python and C, that a call may call: those that it calls, and a tenth more for other
# versions of Python and torch. At 75 a call with one launch takes 15 to 16 µs where Triton's launch
# alone takes 8. Backward passes hold more: autograd's own.
MOST = {
    "token_logprobs": 83,
    "token_logprobs, backward": 116,
    "token_logprobs mask entropy": 91,
    "token_logprobs mask entropy, backward": 143,
    "ppo_loss": 93,
    "ppo_loss, backward": 87,
    "ppo_loss value": 104,
    "ppo_loss value, backward": 96,
    "gae": 96,
    "gae whiten": 131,
    "kl_penalty": 64,
    "kl_penalty, backward": 96,
    "kl_rewards": 101,
    "kl_rewards, backward": 159,
    "full_kl": 90,
    "full_kl, backward": 119,
    "masked_whiten": 97,
    "masked_whiten, backward": 135,
}


def test_an_op_calls_few_functions():
    found = {each.call: each.functions + each.builtins for each in python_work(timed=False)}
    assert found.keys() == MOST.keys()
    assert {call: n for call, n in found.items() if n > MOST[call]} == {}


def test_the_variable_that_names_a_backend_may_change_at_any_time(monkeypatch):
    x = torch.zeros(3)
    monkeypatch.setattr(dispatch, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "_chosen", {})
    for _ in range(2):
        monkeypatch.delenv(dispatch.BACKEND_VARIABLE, raising=False)
        assert dispatch.choose("auto", x) == "triton"
        monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "torch")
        assert dispatch.choose("auto", x) == "torch"
        assert dispatch.choose("triton", x) == "triton"
        monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "cuda")
        with pytest.raises(ValueError, match="unknown backend in FASTRL_KERNELS_BACKEND=cuda"):
            dispatch.choose("auto", x)


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",)])
def test_tensors_on_several_devices_are_refused(monkeypatch, devices):
    monkeypatch.setattr(dispatch, "TRITON_DEVICES", devices)
    tensors = torch.zeros(3), None, torch.zeros(3, device="meta")
    with pytest.raises(ValueError, match="on one device, got cpu, meta: move them to one"):
        dispatch.choose("auto", *tensors)
    with pytest.raises(ValueError, match="on one device, got : move"):
        dispatch.choose("auto", None)


SETUP = """
import random, torch
from triton import knobs
from benchmarks.python_time import nothing_launched

random.seed(0)
memory = torch.zeros(4096, dtype=torch.float32)

def tensor(*dtypes):
    # That starts at a multiple of 16 bytes or, now and then, does not.
    start = random.choice([0] * 15 + [1])
    return memory.view(random.choice(dtypes))[start : start + 256]

def integer():
    return random.choice([0, 1, 2, 16, 17, 2**31 - 16, 2**31, 2**31 + 1, 2**40])

def maybe(x):
    return random.choice([None, x])

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""
SAME = """
with nothing_launched() as launched:
    from fastrl_kernels._triton import gae, launch, logprob, moments, ppo_loss

    def of_logprob():
        return logprob._token_logprobs_fwd_kernel, logprob._launch_fwd, (
            tensor(*FLOATS), tensor(torch.int64, torch.int32), maybe(tensor(torch.bool)),
            maybe(tensor(*FLOATS)), 0.5, tensor(torch.float32), maybe(tensor(torch.float32)),
            maybe(tensor(torch.float32)), integer(), integer(), integer(), integer(), integer(),
        ), {"BLOCK": random.choice([512, 1024]), "VEC": random.choice([4, 8])}

    def of_gae():
        flags = [maybe(tensor(torch.bool)) for _ in range(3)]
        rows = [tensor(*FLOATS), tensor(*FLOATS), maybe(tensor(*FLOATS)), *flags]
        return gae._gae_fwd_kernel, gae._launch_fwd, (
            *rows, tensor(torch.float32), tensor(torch.float32), maybe(tensor(torch.float32)),
            1.0, 0.9, -0.1, integer(), integer(),
        ), {"ROWS": random.choice([1, 2]), "STEPS": random.choice([512, 1024])}

    def of_whitening():
        return moments._whiten_fwd_kernel, moments._launch_whiten_fwd, (
            tensor(*FLOATS), maybe(tensor(torch.bool)), tensor(torch.float32), tensor(*FLOATS),
            tensor(torch.float32), integer(), integer(),
        ), {"SHIFT_MEAN": random.choice([True, False]), "CHUNK": 1024, "BLOCK": 1024}

    direct = 0
    for make in (of_logprob, of_gae, of_whitening):
        for _ in range(600):
            kernel, launch_it, arguments, constants = make()
            warps = {"num_warps": random.choice([1, 4])}
            launched.clear()
            kernel[(3,)](*arguments, **constants, **warps)
            launch_it(3, *arguments, **constants, **warps)
            launch_it(3, *arguments, **constants, **warps)
            own, *others = launched
            assert len(others) == 2
            for other in others:
                assert (own.name, own.key, own.told[0], own.told[-1]) == (
                    other.name, other.key, other.told[0], other.told[-1]
                )
            direct += others[1].hook is None
    print(direct)
"""


def test_a_direct_launch_is_the_one_that_triton_would_make():
    """Of any dtypes, alignments, absent tensors and integers: the same kernel, the same arguments,
    in a third of the calls at least without Triton's own launch."""
    assert int(python(SETUP + SAME)) > 600


HOOKS = """
with nothing_launched() as launched:
    from fastrl_kernels import gae
    x, told = torch.zeros(4, 64), []
    call = lambda: gae(x, x, gamma=1.0, lam=0.95)
    call(), call()
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(told.append)
        call()
        hooks.remove(told.append)
    call()
print([each.hook is not None for each in launched])
"""


def test_hooks_on_launches_see_them():
    assert python(SETUP + HOOKS) == "[True, False, True, True, False]"


TRACED = """
import torch.utils._triton
torch.utils._triton.has_triton = lambda: True  # as where there is a GPU
with nothing_launched() as launched:
    import fastrl_kernels as ops
    x, mask = torch.zeros(4, 64), torch.ones(4, 64, dtype=torch.bool)
    new = torch.zeros(4, 64, requires_grad=True)
    for call in (
        lambda: ops.gae(x, x, mask, gamma=1.0, lam=0.95, whiten=True)[0] + new,
        lambda: ops.ppo_loss(new, x, x, mask)[0],
    ):
        launched.clear()
        torch.compile(call, backend="eager", fullgraph=True)().sum().backward()
        print([each.name for each in launched])
"""


def test_torch_compile_traces_through_launches():
    assert python(SETUP + TRACED).splitlines() == [
        "['_gae_fwd_kernel', '_whiten_fwd_kernel']",
        "['_ppo_loss_fwd_kernel', '_ppo_loss_bwd_kernel']",
    ]
