"""The Python around a kernel's launch launches what Triton itself would."""

import copy
import os

import pytest
import torch

from fastrl_kernels import dispatch
from tests.kernels.test_import import python


def test_the_variable_that_names_a_backend_may_change_at_any_time(monkeypatch):
    x = torch.zeros(3)
    monkeypatch.setattr(dispatch, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "_chosen", {})
    for _ in range(2):
        # As datasets does, where it maps in several processes.
        monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))
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
    from fastrl_kernels._triton import decode_attention, gae, logprob, moments, rms_norm

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

    def of_rms_norm():
        return rms_norm._rms_norm_kernel, rms_norm._launch, (
            tensor(*FLOATS), maybe(tensor(*FLOATS)), tensor(*FLOATS), random.choice([1.0, 1e-6]),
            tensor(*FLOATS), maybe(tensor(*FLOATS)), integer(),
        ), {"WIDE": random.choice([0, 1]), "UNIT_OFFSET": False, "TILE": 64}

    def of_attention():
        dtype, sizes = random.choice(FLOATS), {"DOT": False, "WIDE": False}
        for name in ("D", "DV", "GROUP", "HEADS", "WIDTH", "VALUE_WIDTH", "SPLIT", "TILE"):
            sizes[name] = random.choice([16, 32])
        sizes["REST"] = random.choice([0, 16])
        for name in ("MERGED", "PARTS", "LOADED"):
            sizes[name] = 2
        return decode_attention._decode_attention_fwd_kernel, decode_attention._launch_fwd, (
            *(tensor(dtype) for _ in range(3)), tensor(torch.int64, torch.int32), maybe(2.0), 0.5,
            tensor(dtype), maybe(tensor(torch.float32)), maybe(tensor(torch.int32)),
            maybe(tensor(dtype)), *(integer() for _ in range(4)), maybe(integer()),
            *(random.choice([1, 16, 17, 2**31]) for _ in range(8)),
        ), sizes

    direct = 0
    for make in (of_logprob, of_gae, of_whitening, of_rms_norm, of_attention):
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
    assert int(python(SETUP + SAME)) > 1000


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


AGAIN = """
with nothing_launched() as launched:
    import fastrl_kernels as ops
    query, cache = torch.zeros(2, 4, 16), [torch.zeros(2, 300, 2, 16) for _ in range(2)]
    lengths, logits = torch.ones(2, dtype=torch.int32), torch.zeros(2, 64)
    keys = torch.zeros(2, dtype=torch.int64)

    def attend(**given):
        return ops.decode_attention(query, *cache, lengths, **given)

    def sample(**given):
        return ops.sample_tokens(logits, keys, **given)

    for good, bad in (
        (lambda: attend(window=1), lambda: attend(window=0)),
        (lambda: attend(span=300), lambda: attend(span=301)),
        (attend, lambda: ops.decode_attention(query, *cache, lengths.float())),
        (attend, lambda: ops.decode_attention(query, *cache, lengths[:1])),
        (lambda: sample(top_k=1), lambda: sample(top_k=True)),
        (lambda: sample(top_k=1), lambda: sample(top_k=1.0)),
        (sample, lambda: sample(top_p=float("nan"))),
        (sample, lambda: ops.sample_tokens(logits, keys.double())),
    ):
        for _ in range(2):
            good()
            try:
                bad()
            except (TypeError, ValueError):
                continue
            print("accepted")
    print(launched[0].name)
"""


def test_bad_arguments_are_refused_after_good_ones():
    """Arguments are checked once as long as they are the same."""
    assert python(SETUP + AGAIN) == "_decode_attention_fwd_kernel"
