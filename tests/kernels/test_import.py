"""What importing the kernels costs, and what they say where Triton cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastrl_kernels
from fastrl_kernels import preference

ROOT = Path(__file__).parents[2]

# Runs before the calls below, where nothing but torch can be imported.
PRELUDE = """
import inspect, sys
for name in ("fastrl", "triton", "transformers", "datasets", "accelerate", "peft", "numpy"):
    sys.modules[name] = None
import torch
from fastrl_kernels import *

torch.manual_seed(0)

def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)

logits, ref_logits = leaf(2, 3, 9), torch.randn(2, 3, 9)
labels = torch.tensor([[1, 2, -100], [0, 8, 4]])
mask = torch.tensor([[True, True, False], [True, False, True]])
new, old, ref, values, scores = leaf(2, 3), *torch.randn(2, 2, 3), leaf(2, 3), leaf(2)
hidden, weight, cache = leaf(2, 3, 8), leaf(9, 8), torch.randn(2, 4, 1, 8)
teacher = TeacherHead(torch.randn(2, 3, 5), torch.randn(9, 5))
logprobs = leaf(4)

def alone():
    # The vocabulary of a group of this process.
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return VocabParallel(0, len(weight))

def slots():
    # Of three samples that run.
    state = torch.zeros(5, 3, dtype=torch.long)
    return SlotBuffers(*state, torch.zeros(3, 4, dtype=torch.long), torch.zeros(4, 3, 4))

def preference_loss(op):
    # A call with what it asks for.
    given = {"desirable": torch.arange(4) > 1, "kl": 0.1}
    names = [p.name for p in inspect.signature(op).parameters.values() if p.default is p.empty]
    return op(*(given.get(name, -logprobs.abs() * i) for i, name in enumerate(names, 1)))
"""
# One call of every public name but the preference losses.
CALLS = {
    "Choice": "Choice('torch', 'asked for')",
    "Extras": "Extras(ref, ref, mask)",
    "HeadNorms": "HeadNorms(torch.ones(4), torch.ones(4), 1e-6)",
    "KLTerm": "KLTerm(ref, 0.1)",
    "LinearLossStats": "LinearLossStats(torch.zeros(len(LinearLossStats.NAMES)), old, None)",
    "LiveTokens": "LiveTokens(torch.tensor([4, 4])).bias(4, 4, 4, 1)",
    "LossStats": "LossStats(torch.zeros(len(LossStats.NAMES))).to_dict()",
    "Moments": "Moments(*torch.ones(3))",
    "PolicyLoss": "ppo_loss(ref, old, old, mask, objective=PolicyLoss('sapo'))",
    "SampledTokens": "SampledTokens(*torch.zeros(6, 3))",
    "SlotBuffers": "slots()",
    "TeacherHead": "teacher",
    "TeacherTokens": "linear_kl(hidden, weight, labels, TeacherTokens(labels[..., None], "
    "torch.full((2, 3, 1), -0.1)), mask=mask)",
    "TokenDivergences": "TokenDivergences(old, old, None, None)",
    "TokenSets": "linear_logprobs(hidden, weight, labels, "
    "support=TokenSets.whole(labels.numel(), len(weight)))",
    "ValueTerm": "ValueTerm(values, old, old)",
    "VocabParallel": "linear_logprobs(hidden, weight, labels, vocab_parallel=alone())",
    "advance_slots": "advance_slots(slots(), SampledTokens(torch.arange(3), *torch.zeros(5, 3)), "
    "torch.tensor([1])) or torch.zeros(1)",
    "decode_attention": "decode_attention(cache[:, 0], cache, cache, torch.tensor([1, 4]))",
    "explain": "explain('cpu')",
    "full_kl": "full_kl(logits, ref_logits, mask=mask)",
    "gae": "gae(new, values, mask, gamma=0.9, lam=0.9, whiten=True)",
    "kl_penalty": "kl_penalty(new, ref, 'k3', mask=mask)",
    "kl_rewards": "kl_rewards(new, ref, scores, mask, coef=0.1)",
    "layers": "layers.TokenLogProbs()(logits, labels)",
    "linear_kl": "linear_kl(hidden, weight, labels, teacher, mask=mask, entropy=True)",
    "linear_kl_loss": "linear_kl_loss(hidden, weight, labels, teacher, beta=0.5, mask=mask)[0]",
    "linear_logprobs": "linear_logprobs(hidden, weight, labels, mask=mask, entropy=True)",
    "linear_nll_loss": "linear_nll_loss(hidden, weight, labels, mask=mask)[0]",
    "linear_ppo_loss": "linear_ppo_loss(hidden, weight, labels, old, old, mask)[0]",
    "linear_sample": "linear_sample(torch.randn(3, 4), torch.randn(11, 4), torch.arange(3))[:2]",
    "linear_sample_pays": "linear_sample_pays(32, 896, 151936, torch.bfloat16)",
    "losses": "losses.PPOLoss(cliprange=0.1)(new, old, old, mask)[0]",
    "masked_mean": "masked_mean(values, mask)",
    "masked_moments": "masked_moments(values, mask)",
    "masked_var": "masked_var(values, mask)",
    "masked_whiten": "masked_whiten(values, mask)",
    "merge_moments": "merge_moments(Moments(*torch.ones(3, 2)))",
    "ppo_loss": "ppo_loss(new, old, old, mask, value=ValueTerm(values, old, old))[0]",
    "rms_norm": "rms_norm(logits, torch.ones(logits.shape[-1]), residual=logits)",
    "rotate_and_store": "rotate_and_store(*[cache[:, 0]] * 3, *[torch.ones(2, 2)] * 2, cache, "
    "cache, torch.tensor([1, 0]))",
    "sample_keys": "sample_keys(0, torch.arange(3), 1)",
    "sample_tokens": "sample_tokens(torch.randn(3, 11), torch.arange(3), top_k=5)",
    "sample_with_support": "sample_with_support(torch.randn(3, 11), torch.arange(3), top_k=5)[0]",
    "swiglu": "swiglu(logits, ref_logits)",
    "token_logprobs": "token_logprobs(logits, labels, mask=mask, entropy=True)",
}


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a fresh interpreter prints; Triton's interpreter mode is off unless asked for."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**inherited, **environment}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_public_name_has_a_call():
    called = {*CALLS, *preference.__all__}
    assert called == set(fastrl_kernels.__all__), "add a line to CALLS for what is new"


def test_every_op_runs_where_nothing_but_torch_can_be_imported():
    """On a CPU, forward and backward, without triton and without anything of ``fastrl``."""
    code = (
        PRELUDE
        + f"calls = {CALLS!r}\n"
        + f"calls |= {{name: f'preference_loss({{name}})' for name in {preference.__all__!r}}}"
        + """
def tensors(result):
    result = result if isinstance(result, tuple) else (result,)
    return [x for x in result if isinstance(x, torch.Tensor)]

for name, call in calls.items():
    found = tensors(eval(call))
    assert all(x.isfinite().all() for x in found), name
    wanted = [x for x in found if x.requires_grad and x.grad_fn is not None]
    if wanted:
        sum(x.sum() for x in wanted).backward()
    print(name, "with gradients" if wanted else "")
assert all(x.grad.isfinite().all() for x in (logits, new, values, scores, logprobs))
"""
    )
    said = dict(line.partition(" ")[::2] for line in python(code).splitlines())
    assert said.keys() == set(fastrl_kernels.__all__)
    for name in fastrl_kernels.__all__:
        if name.endswith(("_loss", "_logprobs", "_rewards", "_kl")):
            assert said[name] == "with gradients"


def test_importing_needs_torch_only_and_forced_triton_on_the_cpu_says_what_to_do():
    code = """
import sys, torch, fastrl_kernels
print(sorted({"triton", "transformers", "datasets", "fastrl", "accelerate"} & sys.modules.keys()))
logits, labels = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64)
for op in (
    lambda: fastrl_kernels.token_logprobs(logits, labels, backend="triton"),
    lambda: fastrl_kernels.full_kl(logits, logits, backend="triton"),
):
    try:
        op()
    except ValueError as error:
        print(error)
"""
    imported, *said = python(code).splitlines()
    assert imported == "[]"
    assert len(said) == 2
    for line in said:
        assert "backend='triton' cannot be honoured" in line
        assert "TRITON_INTERPRET=1" in line
        assert "backend='torch'" in line


@pytest.mark.parametrize("name", ["__init__.py", "torch-ext/__init__.py"])
def test_the_kernels_folder_is_no_package(name):
    """With an __init__.py, transformers would import it in place of Hugging Face's `kernels`."""
    assert not (ROOT / "kernels" / name).exists()
