"""A tied embedding's gradient is that of plain autograd, and is made without a second dense one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl.models.scoring import PolicyObjective, ScoringRequest
from fastrl.models.tied_embedding import sparse_embedding_gradient
from fastrl_kernels.head_pass import HeadGradients
from tests import tiny_models
from tests.golden import tiny

ROWS = torch.tensor([3, 4, 5, 11, 14, 15])  # of a batch [2, 8]


class Called(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ids():
    ids = torch.stack(tiny_models.prompts(8, 8))
    ids[0, 1] = ids[0, 2] = ids[1, 0]  # looked up three times
    ids[1, 5] = tiny.PAD
    return ids


def gradients(policy, ids, logprobs_of):
    """Of every parameter, from a loss of log-probs and values, accumulated over two backwards."""
    policy.zero_grad()
    for _ in range(2):
        logprobs_of(policy, ids).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def fused(policy, ids):
    objective = PolicyObjective(torch.full((len(ROWS),), -4.0), torch.ones(len(ROWS)), 10.0)
    scores = policy(
        input_ids=ids, scoring=ScoringRequest(ROWS, ids.flatten()[ROWS], objective=objective)
    )
    return scores.loss + scores.values.square().sum()


def plain(policy, ids):
    logits, _, values = policy(input_ids=ids)
    labels = ids.flatten()[ROWS]
    logprobs = logits.flatten(0, 1)[ROWS].log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return -(logprobs + 4.0).exp().mean() + values.flatten()[ROWS].square().sum()


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2"])
def test_gradients_are_plain_autograd_s(family, ids):
    """OPT's embedding has a padding token, whose lookups have no gradient."""
    changes = {} if family in ("gpt2", "opt") else {"tie_word_embeddings": True}
    policy = tiny_models.policy(family, **changes)
    assert (
        policy.pretrained_model.get_input_embeddings().weight
        is policy.get_output_embeddings().weight
    )
    got, expected = gradients(policy, ids, fused), gradients(policy, ids, plain)
    for name, gradient in expected.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            assert not got[name].is_sparse, name
            # Sums over 16 positions of figures up to 1e2 in fp32.
            torch.testing.assert_close(got[name], gradient, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_has_one_dense_gradient(ids, tied, monkeypatch):
    policy = tiny_models.policy("llama", tie_word_embeddings=tied)
    fused(policy, ids)  # the head is chosen
    buffers = []
    results = HeadGradients.results
    monkeypatch.setattr(
        HeadGradients,
        "results",
        lambda self: buffers.append(self.dweight.data_ptr()) or results(self),
    )
    loss = fused(policy, ids)
    if tied:
        loss.backward()
    with Called() as called:
        fused(policy, ids).backward()
    assert ("embedding_dense_backward" in called.names) == (not tied)
    if tied:  # the lookups' rows were added in place
        assert policy.get_output_embeddings().weight.grad.data_ptr() == buffers[0]


def test_the_hook_is_gone_afterwards(ids):
    model = tiny_models.language_model()
    embedding = model.get_input_embeddings()
    with sparse_embedding_gradient(model):
        assert len(embedding._forward_hooks) == 1
    assert not embedding._forward_hooks
    with torch.no_grad(), sparse_embedding_gradient(model):
        assert not embedding._forward_hooks
