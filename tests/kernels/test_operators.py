"""The operators that stand for ops in compiled code: what they promise, and their names."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._library.custom_ops import CustomOpDef

from fastrl_kernels.operators import NAMESPACE
from tests.kernels.test_compile import CASES, Inputs, fresh_compiler, inputs, loss, outcome
from tests.kernels.test_import import python

__all__ = ["fresh_compiler"]  # a fixture


REGISTERED = {
    value._name: value
    for name, module in sys.modules.items()
    if name.startswith("fastrl_kernels.")
    for value in vars(module).values()
    if isinstance(value, CustomOpDef)
}


def recorded(function: Callable[..., Any], x: Inputs) -> dict[str, tuple[Any, ...]]:
    """The arguments that each operator gets where ``function`` is compiled."""
    found: dict[str, tuple[Any, ...]] = {}

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "namespace", None) == NAMESPACE:
                found[target._opname] = args
            return super().call_function(target, args, kwargs)

    def recording(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(lambda *args: Recorder(graph).run(*args))

    backend = aot_autograd(fw_compiler=recording, bw_compiler=recording)
    outcome(torch.compile(function, backend=backend, fullgraph=True), x)
    return found


# By case, the operators that it calls.
OPCHECKS: dict[str, set[str]] = {
    "full_kl masked": {"full_kl", "full_kl_backward"},
    "linear_kl": {"checked_labels", "linear_kl", "linear_kl_backward"},
    "linear_kl with everything": {"checked_labels", "linear_kl", "linear_kl_backward"},
    "linear_kl tokens": {"checked_labels", "linear_kl", "linear_kl_backward"},
    "linear_kl_loss": {"checked_labels", "linear_kl_loss"},
    "linear_kl_loss with everything": {"checked_labels", "linear_kl_loss"},
    "linear_kl_loss tokens": {"checked_labels", "linear_kl_loss"},
    "linear_logprobs entropy": {"checked_labels", "linear_logprobs", "linear_logprobs_backward"},
    "linear_logprobs extras": {"checked_labels", "linear_logprobs", "linear_logprobs_backward"},
    "linear_nll_loss": {"checked_labels", "linear_nll_loss"},
    "linear_nll_loss with everything": {"checked_labels", "linear_nll_loss"},
    "linear_ppo_loss": {"checked_labels", "linear_ppo_loss"},
    "linear_ppo_loss with everything": {"checked_labels", "linear_ppo_loss"},
    "linear_sample with everything": {"linear_sample", "sample_keys"},
    "sample_keys tensors": {"sample_keys"},
    "sample_tokens tensors": {"sample_keys", "sample_tokens"},
    "token_logprobs": {"checked_labels", "token_logprobs", "token_logprobs_backward"},
    "token_logprobs entropy": {"checked_labels", "token_logprobs", "token_logprobs_backward"},
}


# torch 2.15 reads it of copies, which are no leaves, and hides what it is told from programs alone.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("case", OPCHECKS)
def test_operators_keep_what_they_promise(case):
    """Their schemas, their fakes and their gradients, as torch checks them; of bfloat16, where
    results in fp32 differ from those in the dtype of the inputs."""
    calls = recorded(lambda x: CASES[case](x, "torch"), inputs(4, torch.bfloat16))
    unread = {"checked_labels"} if torch.cuda.is_available() else set()  # where reading would wait
    assert calls.keys() == OPCHECKS[case] - unread
    for name, arguments in calls.items():
        operator, differentiable = REGISTERED[name]._opoverload, REGISTERED[name]._backward_fn
        leaves = {"logits", "hidden", "weight", "bias"} if differentiable else ()
        given = [
            x.detach().clone().requires_grad_(argument.name in leaves)
            if isinstance(x, Tensor)
            else x
            for x, argument in zip(arguments, operator._schema.arguments, strict=True)
        ]
        torch.library.opcheck(operator, given)


def test_every_operator_is_checked():
    assert set().union(*OPCHECKS.values()) == REGISTERED.keys()


def test_gradients_are_computed_forward_only_for_those_who_ask():
    x = inputs(6)
    x = x._replace(weight=x.weight.detach())
    calls = recorded(lambda x: loss(x, bias=x.bias, backend="torch"), x)
    assert calls["linear_ppo_loss"][-1] == [True, False, True]


COPIES = """
import importlib.util, sys
import torch, fastrl_kernels
from pathlib import Path

def load(name):
    file = Path(fastrl_kernels.__file__)
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

# Graphs that were traced call an operator by its address, which is another's once it is freed.
torch.library.Library._destroy = lambda library: sys.exit(f"frees operators of {library.ns}")
first = load("_fastrl_kernels_0a1b")
again = load("_fastrl_kernels_0a1b")  # as the hub does where it is asked twice
other = load("other-kernels")
for name in [name for name in sys.modules if name.startswith("fastrl_kernels")]:
    del sys.modules[name]
import fastrl_kernels as fresh

logits = torch.randn(2, 9, requires_grad=True)
labels = torch.tensor([1, 8])
found = []
for module in (fastrl_kernels, first, again, other, fresh):
    torch._dynamo.reset()
    for op in (module.token_logprobs, torch.compile(
        module.token_logprobs, backend="aot_eager", fullgraph=True
    )):
        logprobs = op(logits, labels, backend="torch")
        found.append((logprobs.tolist(), torch.autograd.grad(logprobs.sum(), logits)[0].tolist()))
assert len(found) == 10 and all(x == found[0] for x in found)
names = {op.split("::")[0] for op in torch._C._dispatch_get_all_op_names() if "token_logp" in op}
print(sorted(names))
"""


def test_copies_of_the_package_live_side_by_side():
    """The Kernel Hub imports it under names of its own, perhaps twice, beside an installed one."""
    said = python(COPIES).splitlines()[-1]
    assert said == "['_fastrl_kernels_0a1b', 'fastrl_kernels', 'fastrl_kernels_2', 'other_kernels']"
