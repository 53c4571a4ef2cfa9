"""``fastrl merge``, ``push`` and ``chat``: what is done with a model behind its training."""

import io
import logging
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, cli
from fastrl.data import reads_eos
from fastrl.run import hub
from tests import chat_tokenizer, tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
IDS = torch.stack(tiny_models.prompts(6, 6))


@pytest.fixture
def tuned(tmp_path):
    """A run's folder with an adapter that PPO has saved, and the model that was saved."""
    tiny_models.language_model().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    torch.manual_seed(0)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path / "base", peft_config=tiny_models.lora()
    )
    config = PPOConfig(batch_size=2, learning_rate=3e-4)
    trainer = PPOTrainer(config, model, None, tiny.tokenizer())
    trainer.save_pretrained(tmp_path / "run" / "model")
    return tmp_path / "run", model.eval()


def refusal(capsys, *arguments):
    """The error of a command that ends with 2."""
    assert cli.main([str(x) for x in arguments]) == 2
    return capsys.readouterr().err


def test_a_merged_adapter_is_a_whole_model(tuned, tmp_path):
    run, model = tuned
    out = tmp_path / "merged"
    assert cli.main(["merge", str(run), str(out)]) == 0
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(out).eval()
    with torch.no_grad():
        logits, _, values = model(IDS)
        torch.testing.assert_close(plain(IDS).logits, logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(wrapped(IDS)[2], values, rtol=0, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out)("w5")["input_ids"] == [5]
    assert (out / "generation_config.json").exists()
    assert not any(name.startswith("v_head.") for name in load_file(out / "model.safetensors"))
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "mit"
    assert card.data.library_name == "transformers"
    assert "ppo" in card.data.tags
    assert "| `learning_rate` | 0.0003 |" in card.text
    assert 'from_pretrained("merged")' in card.text


def test_merging_refuses_what_it_would_get_wrong(tuned, tmp_path, capsys):
    run, _ = tuned
    assert "is there and not empty" in refusal(capsys, "merge", run, tmp_path / "base")
    whole = refusal(capsys, "merge", tmp_path / "base", tmp_path / "out")
    assert "holds no adapter but a whole model" in whole
    assert "--dtype" in whole
    assert not (tmp_path / "out").exists()
    assert (
        cli.main(["merge", str(tmp_path / "base"), str(tmp_path / "out"), "--dtype", "bfloat16"])
        == 0
    )
    assert {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }


def test_a_merged_reward_model_keeps_its_head_and_what_it_reads(tmp_path):
    from peft import get_peft_model

    tiny_models.language_model().save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    model = get_peft_model(base, tiny_models.lora(task_type="SEQ_CLS")).eval()
    reads_eos.record(model, True)
    model.save_pretrained(tmp_path / "rm")
    reads_eos.save_beside_adapter(model, tmp_path / "rm")
    tiny.tokenizer().save_pretrained(tmp_path / "rm")
    assert cli.main(["merge", str(tmp_path / "rm"), str(tmp_path / "out")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert reads_eos.recorded(merged) is True
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=0, atol=1e-4)


NO_MODEL = (  # of the folder of a trainer
    "training_args.bin", "trainer_state.json", "all_results.json", "manifest.json",
    "completions/completions_00001.parquet", "ledger/steps-000001-000002.parquet",
    "process-0/state.json", "logs/metrics.txt", "samples.jsonl", "report.html",
)  # fmt: skip


def test_a_dry_run_tells_what_is_pushed_and_reaches_nothing(tuned, capsys, monkeypatch):
    run, _ = tuned
    for name in NO_MODEL:
        (run / "model" / name).parent.mkdir(exist_ok=True)
        (run / "model" / name).write_bytes(b"x")
    monkeypatch.setattr(hub, "upload", lambda *_, **__: pytest.fail("uploaded"))
    before = (run / "model" / "README.md").read_text()
    words = ["push", str(run), "me/tuned", "--license", "apache-2.0", "--dry-run"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "value_head.safetensors" in out
    assert [name for name in NO_MODEL if name in out] == []
    assert "# me/tuned" in out
    assert 'PeftModel.from_pretrained(base, "me/tuned")' in out
    assert "license: apache-2.0" in out
    assert "the adapter's base is a folder here" in out
    assert (run / "model" / "README.md").read_text() == before
    assert "Repo id" in refusal(capsys, "push", run, "a/b/c", "--dry-run")


@pytest.mark.parametrize("words", [("push", "nowhere", "me/x", "--dry-run"), ("merge", "nowhere")])
def test_a_name_of_nothing_is_no_model(words, tmp_path, capsys, monkeypatch):
    """A name without a slash may be an id of the Hub's, which nothing is uploaded from."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = () if words[0] == "push" else (tmp_path / "out",)
    assert "there is no folder nowhere" in refusal(capsys, *words, *out)


def test_a_push_is_one_upload_with_the_repositorys_card(tuned, monkeypatch):
    run, _ = tuned
    calls = []

    def upload(folder, repo_id, **options):
        files = {x.name: x.read_bytes() for x in Path(folder).iterdir()}
        calls.append((repo_id, options, files))

    monkeypatch.setattr(hub, "upload", upload)
    assert cli.main(["push", str(run), "me/tuned", "--private"]) == 0
    ((repo_id, options, files),) = calls
    assert (repo_id, options) == ("me/tuned", {"private": True})
    assert b"# me/tuned" in files["README.md"]
    saved = (run / "model" / "value_head.safetensors").read_bytes()
    assert files["value_head.safetensors"] == saved


def said(monkeypatch, capsys, text, *arguments):
    """The output of a chat that reads a text."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert cli.main(["chat", *(str(x) for x in arguments)]) == 0
    return capsys.readouterr().out


GREEDY = ("--temperature", "0", "--max-new-tokens", "4")


def test_a_chat_goes_on_with_each_line_as_the_model_does(tuned, monkeypatch, capsys):
    run, model = tuned
    ids = torch.tensor([[5, 6]])
    with torch.no_grad():
        expected = model.generate(input_ids=ids, do_sample=False, max_new_tokens=4)[0, 2:]
    line = tiny.tokenizer().decode(expected, skip_special_tokens=True)
    out = said(monkeypatch, capsys, "w5 w6\n\n/clear\nw5 w6\n/exit\nw7\n", run, *GREEDY)
    assert out == f"{line}\n" * 2


def test_a_chat_says_how_it_is_used_where_somebody_types(tuned, monkeypatch, capsys):
    run, _ = tuned
    said_of_it = "each line is a text to go on with; /clear forgets the turns, /exit"
    assert said(monkeypatch, capsys, "/help\n", run).startswith(said_of_it)
    typed = iter(["/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["chat", str(run)]) == 0
    assert capsys.readouterr().out.startswith(said_of_it)


def test_a_chat_takes_the_token_that_pads_for_a_character(tmp_path, monkeypatch, capsys, caplog):
    """As a tokenizer without an unknown token has it."""
    tiny_models.language_model().save_pretrained(tmp_path)
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    pads = tokenizer.pad_token
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    assert len(said(monkeypatch, capsys, f"w5 {pads}\n", tmp_path, *GREEDY).splitlines()) == 1
    assert "attention_mask" not in caplog.text


def test_a_chat_in_turns_by_the_template(tmp_path, monkeypatch, capsys):
    tokenizer = chat_tokenizer.tokenizer()
    model = tiny_models.language_model(vocab_size=len(tokenizer), n_positions=512)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = []
    generate = type(model).generate

    def recorded(self, **given):
        prompts.append(tokenizer.decode(given["input_ids"][0]))
        return generate(self, **given)

    monkeypatch.setattr(type(model), "generate", recorded)
    text = "one\ntwo\n/clear\nthree\n"
    out = said(monkeypatch, capsys, text, tmp_path, *GREEDY, "--system", "brief")
    assert len(out.splitlines()) >= 3
    assert all(x in prompts[1] for x in ("brief", "one", "two"))
    assert "one" not in prompts[2]
    assert "brief" in prompts[2]


def test_an_interrupted_reply_ends_and_the_chat_goes_on(tuned, monkeypatch, capsys):
    run, model = tuned
    kind, calls = type(model.pretrained_model), []

    def interrupted(self, *_, streamer, **__):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        streamer.on_finalized_text("done", stream_end=True)

    monkeypatch.setattr(kind, "generate", interrupted)
    assert said(monkeypatch, capsys, "w5\nw6\n", run).endswith("…\ndone\n")


def test_a_chat_refuses_what_cannot_talk(tuned, tmp_path, capsys):
    run, _ = tuned
    assert "--system needs a chat template" in refusal(capsys, "chat", run, "--system", "x")
    assert "--top-p must lie in (0, 1]" in refusal(capsys, "chat", run, "--top-p", "0")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    classifier.save_pretrained(tmp_path / "rm")
    tiny.tokenizer().save_pretrained(tmp_path / "rm")
    assert "is a reward model, which writes nothing" in refusal(capsys, "chat", tmp_path / "rm")
