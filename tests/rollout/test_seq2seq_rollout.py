"""Rollouts of encoder–decoders: model.generate, with the figures that the engine has for others."""

import pytest
import torch

from fastrl import GenerateEngine, RolloutEngine, SamplingParams
from tests import seq2seq_models, tiny_models
from tests.golden import tiny

FAMILIES = pytest.mark.parametrize("family", seq2seq_models.FAMILIES)
SAMPLINGS = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "bent": {"repetition_penalty": 1.4, "suppress_tokens": (10, 11), "min_new_tokens": 3},
}


def engine(model, **options):
    return GenerateEngine(model, tiny.tokenizer(), scores=True, **options)


def plain(model, family, prompt, sequence):
    """Logits and values in front of each token of a response, by a forward of one sample."""
    start = torch.tensor([seq2seq_models.START[family]])
    read = torch.cat([start, sequence])[None, :-1]
    with torch.no_grad():
        logits, _, values = model(prompt[None], decoder_input_ids=read)
    return logits[0].double(), values[0]


@FAMILIES
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_figures_are_those_of_plain_forwards(family, sampling):
    model = seq2seq_models.policy(family)
    params = SamplingParams(max_new_tokens=6, seed=3, n=2, **SAMPLINGS[sampling])
    prompts = tiny_models.prompts(5, 1, 9, 5)
    output = engine(model, batch_size=3).generate(prompts, params)
    assert len(output.sequences) == 8
    for i, sequence in enumerate(output.sequences):
        logits, values = plain(model, family, prompts[i // 2], sequence)
        at_one = logits.log_softmax(-1)
        tempered = (logits / params.temperature).log_softmax(-1)
        expected = {
            "logprobs": tempered.gather(1, sequence[:, None])[:, 0],
            "logprobs_t1": at_one.gather(1, sequence[:, None])[:, 0],
            "entropies": torch.special.entr(tempered.exp()).sum(-1),
            "values": values,
        }
        for name, wanted in expected.items():
            got = getattr(output, name)[i]
            torch.testing.assert_close(got.double(), wanted.double(), atol=1e-5, rtol=1e-5)
        at_end = bool(sequence[-1] == tiny.EOS)
        assert output.finish_reasons[i] == ("eos" if at_end else "length")
        assert at_end or len(sequence) == 6


@FAMILIES
def test_a_repetition_penalty_sees_what_the_decoder_reads(family):
    model = seq2seq_models.policy(family)
    prompts = tiny_models.prompts(6, 6)
    params = SamplingParams(max_new_tokens=6, temperature=0, repetition_penalty=1.7)
    output = engine(model).generate(prompts, params)
    for prompt, sequence in zip(prompts, output.sequences, strict=True):
        logits, _ = plain(model, family, prompt, sequence)
        for t, row in enumerate(logits):
            read = [seq2seq_models.START[family], *sequence[:t].tolist()]
            seen = torch.tensor(read).unique()
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.7, row[seen] * 1.7)
        assert logits.argmax(-1).tolist() == sequence.tolist()


@FAMILIES
def test_limits_and_stop_sequences_are_each_samples_own(family):
    model = seq2seq_models.policy(family)
    prompts = tiny_models.prompts(4, 7, 2)
    free = engine(model).generate(prompts, SamplingParams(max_new_tokens=8, temperature=0))
    assert all(len(s) > 4 for s in free.sequences), "or nothing is cut here"
    limited = SamplingParams(max_new_tokens=[2, 4, 1], temperature=0)
    output = engine(model).generate(prompts, limited)
    assert [len(s) for s in output.sequences] == [2, 4, 1]
    assert output.finish_reasons == ["length"] * 3
    stop = tuple(free.sequences[1][:3].tolist())
    stopped = SamplingParams(max_new_tokens=8, temperature=0, stop=[stop])
    steps = []
    alone = GenerateEngine(model, tiny.tokenizer())
    alone.generate(prompts[1:2], stopped)  # the first one also checks the model
    decoder = model.pretrained_model.get_decoder()
    handle = decoder.register_forward_hook(lambda *_: steps.append(1))
    alone.generate(prompts[1:2], stopped)
    handle.remove()
    assert len(steps) == 3, "it goes on no longer than a sample does"
    output = engine(model).generate(prompts[1:2], stopped)
    assert output.sequences[0].tolist() == free.sequences[1][:3].tolist()
    assert output.finish_reasons == ["stop"]


def test_the_engine_for_causal_models_names_the_other():
    with pytest.raises(ValueError, match=r"encoder–decoder.*GenerateEngine"):
        RolloutEngine(seq2seq_models.policy(), tiny.tokenizer())
