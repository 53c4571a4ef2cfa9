"""Prompts that are copied from slot to slot."""

import torch

from fastrl.rollout.kv_cache import KVCache, LayerShape, PromptCopy


def test_prompts_are_copied_as_they_were_and_nothing_else_is() -> None:
    """Also to and from each other's slots; what ended samples left, which may be NaN, is gone."""
    layers = [LayerShape(2, 3, 5), LayerShape(1, 4, 4)]
    kv_cache = KVCache(layers, 5, 7, torch.float32, torch.device("cpu"))
    stored = [*kv_cache.keys, *kv_cache.values]
    for x in stored:
        x.copy_(torch.randn(x.shape))
        x[:, 4:] = torch.nan
    before = [x.clone() for x in stored]
    kv_cache.copy([PromptCopy(0, [1, 3], 4), PromptCopy(1, [0], 2), PromptCopy(2, [2], 0)])
    for x, old in zip(stored, before, strict=True):
        assert torch.equal(x[[1, 3], :4], old[[0, 0], :4])
        assert torch.equal(x[0, :2], old[1, :2])
        assert torch.equal(x[4].nan_to_num(9), old[4].nan_to_num(9))
        assert not x[[1, 3], 4:].any()
        assert not x[0, 2:].any()
        assert not x[2].any()
