"""Objects on their way to other processes: the same behind it, and no larger than they are."""

import pickle

import numpy as np
import torch

from fastrl.run.parcels import opened, parcel


def test_values_and_tensors_of_all_kinds_arrive():
    sent = {
        "ids": [torch.arange(300)[10:20], torch.tensor([-1, 1 << 40])],
        "rest": (torch.eye(3).t()[1:], torch.tensor(2.5, dtype=torch.float64), torch.zeros(0, 4)),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "plain": [None, "ä", 1, {"state": np.arange(3, dtype=np.uint32)}],
    }
    found = opened(parcel(sent))
    for name in ("ids", "rest"):
        for one, other in zip(found[name], sent[name], strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert torch.equal(found["half"].view(torch.int16), sent["half"].view(torch.int16))
    assert torch.equal(found["mask"], sent["mask"])
    assert str(found["plain"]) == str(sent["plain"])


def test_views_are_sent_without_the_rest_of_their_storage():
    whole = torch.randint(1000, (128, 500)), torch.randn(128, 500)
    rows = [x[i, :20] for x in whole for i in range(128)]
    # Ids below 1000 take 2 bytes, log-probs 4, lengths 4 each; the rest is overhead.
    assert len(parcel(rows)) < 128 * (20 * (2 + 4) + 2 * (4 + 4)) + 500
    assert len(pickle.dumps(rows)) > 100 * len(parcel(rows)), "as it was"
