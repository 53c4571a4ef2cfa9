"""The Kernel Hub package, loaded by Hugging Face's own ``kernels``."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import fastrl_kernels

# The package, not a checkout's folder of its name.
pytest.importorskip("kernels.layer", reason="kernels is not installed")
import kernels

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "kernels/torch-ext/fastrl_kernels"

LOAD = """
import json, sys
for name in ("fastrl", "fastrl_kernels", "transformers", "datasets", "triton"):
    sys.modules[name] = None
from pathlib import Path
import kernels, torch
ops = kernels.get_local_kernel(Path(sys.argv[1]))
torch.set_num_threads(1)
torch.manual_seed(0)
logits = torch.randn(3, 50, requires_grad=True)
logprobs, entropies = ops.token_logprobs(logits, torch.tensor([3, 49, -100]), entropy=True)
(logprobs.sum() - entropies.sum()).backward()
found = (logprobs, entropies, logits.grad)
results = [x.detach().flatten().view(torch.int32).tolist() for x in found]
loaded = sorted({n for n, m in sys.modules.items() if m and n.endswith("fastrl_kernels")})
print(json.dumps([ops.__name__, sorted(ops.__all__), ops.__file__, results, loaded]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as it would be uploaded."""
    repository = tmp_path_factory.mktemp("repository")
    command = [sys.executable, ROOT / "kernels/build_hub.py", "--output", repository / "build"]
    subprocess.run(command, check=True, capture_output=True)
    return repository


@pytest.fixture(params=["source", "built"])
def repository(request: pytest.FixtureRequest, built: Path) -> Path:
    return SOURCE if request.param == "source" else built


def expected_bits() -> list[list[int]]:
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 50, requires_grad=True), torch.tensor([3, 49, -100])
    logprobs, entropies = fastrl_kernels.token_logprobs(
        logits, labels, entropy=True, backend="torch"
    )
    (logprobs.sum() - entropies.sum()).backward()
    found = (logprobs, entropies, logits.grad)
    return [x.detach().flatten().view(torch.int32).tolist() for x in found]


def test_it_loads_where_neither_fastrl_nor_an_installed_copy_can_be_imported(built):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",)}
    environment["FASTRL_KERNELS_BACKEND"] = "torch"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(built)],
        env=environment,
        cwd=ROOT,  # whose folder `kernels` must not stand in for the package
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, public, file, results, loaded = json.loads(done.stdout)
    assert name.startswith("_fastrl_kernels_")
    assert Path(file).is_relative_to(built)
    assert public == sorted(fastrl_kernels.__all__)
    assert results == expected_bits()
    assert loaded == []


def test_every_backend_gets_a_variant_with_an_identity_of_its_own(built):
    variants = sorted(path.name for path in (built / "build").iterdir())
    assert variants == ["torch-cpu", "torch-cuda", "torch-rocm"]
    found = [
        kernels.Metadata.read_from_file(built / "build" / name / "metadata.json")
        for name in variants
    ]
    assert [str(m.backend.backend_type).split(".")[-1].lower() for m in found] == [
        "cpu", "cuda", "rocm",
    ]  # fmt: skip
    assert len({m.id for m in found}) == 3
    for metadata in found:
        assert metadata.name.python_name == "fastrl_kernels"
        assert metadata.version == 0
        assert metadata.license == "Apache-2.0"
        assert metadata.python_depends == []


def test_a_variant_tells_the_digest_of_its_files(built, tmp_path):
    rust = pytest.importorskip("kernels._rust", reason="kernels before 0.17")
    variant = tmp_path / "torch-cuda"
    shutil.copytree(built / "build/torch-cuda", variant)
    told = kernels.Metadata.read_from_file(variant / "metadata.json").digest
    told.validate(rust.Digest.hash_variant(told.algorithm, variant))
    with (variant / "dispatch.py").open("a") as file:
        file.write("# changed")
    with pytest.raises(rust.DigestValidationError, match=r"dispatch\.py"):
        told.validate(rust.Digest.hash_variant(told.algorithm, variant))


def test_the_builder_takes_the_configuration():
    rust = pytest.importorskip("kernels._rust", reason="kernels before 0.17")
    build = rust.Build.open(ROOT / "kernels")
    assert sorted(map(str, build.general.backends)) == ["cpu", "cuda", "rocm"]


def test_the_readme_names_every_op():
    readme = (ROOT / "kernels/README.md").read_text(encoding="utf-8")
    ops = [
        name for name in fastrl_kernels.__all__ if inspect.isfunction(vars(fastrl_kernels)[name])
    ]
    assert [name for name in ops if f"`{name}`" not in readme] == []


def test_a_variant_holds_the_sources_and_nothing_else(built):
    def files(folder: Path) -> dict[str, bytes]:
        paths = (path for path in folder.rglob("*") if path.is_file())
        kept = (path for path in paths if "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)): path.read_bytes() for path in kept}

    variant, source = files(built / "build/torch-cuda"), files(SOURCE)
    assert variant.pop("metadata.json") != source.pop("metadata.json")
    assert variant == source


class PlainLogProbs(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class PlainKL(nn.Module):
    def forward(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        logp, logq = (torch.log_softmax(x, -1) for x in (logits, ref_logits))
        return (logp.exp() * (logp - logq)).sum(-1)


class PlainWhiten(nn.Module):
    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        counted = values[mask]
        whitened = (values - counted.mean()) * torch.rsqrt(counted.var() + 1e-8)
        return torch.where(mask, whitened, 0.0)


LAYERS = {
    "TokenLogProbs": (PlainLogProbs, (4, 30), lambda: torch.arange(4)),
    "FullKL": (PlainKL, (4, 30), lambda: torch.randn(4, 30)),
    "MaskedWhiten": (PlainWhiten, (4, 30), lambda: torch.rand(4, 30) < 0.7),
}


def test_every_layer_is_tested_below():
    layers = vars(fastrl_kernels.layers).values()
    public = {x.__name__ for x in layers if isinstance(x, type) and issubclass(x, nn.Module)}
    assert public == {*LAYERS, "RMSNorm", "SwiGLU"}


@pytest.mark.parametrize("name", LAYERS)
def test_kernelize_swaps_the_forward_and_keeps_the_numbers(name, repository):
    plain, shape, other = LAYERS[name]
    torch.manual_seed(0)
    leaf, other = torch.randn(shape, requires_grad=True), other()
    expected = plain()(leaf, other)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), leaf)

    # A class of this test's own: the decorator writes to it.
    layer = kernels.use_kernel_forward_from_hub(name)(type(plain.__name__, (plain,), {}))
    model = nn.Sequential()
    model.add_module("layer", layer())
    hub = kernels.LocalLayerRepository(repository, layer_name=name)
    with kernels.use_kernel_mapping({name: {"cpu": hub}}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
    assert model.layer.forward.__func__ is hub.load().forward
    actual = model.layer(leaf, other)
    (grad,) = torch.autograd.grad(actual.square().sum(), leaf)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_kernelize_swaps_the_norms_of_models_for_inference(repository):
    norm = kernels.use_kernel_forward_from_hub("RMSNorm")(type("Norm", (LlamaRMSNorm,), {}))
    model = nn.Sequential(norm(16))
    model[0].weight.normal_()
    x = torch.randn(3, 16)
    expected = model(x)
    hub = kernels.LocalLayerRepository(repository, layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": hub}}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
    assert model[0].forward.__func__ is hub.load().forward
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def an_mlp(activation: str = "silu") -> LlamaMLP:
    """Llama's, decorated: transformers names no layer for it."""
    decorate = kernels.use_kernel_forward_from_hub("SwiGLU")
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, hidden_act=activation
    )
    return decorate(type("MLP", (LlamaMLP,), {}))(config)


def kernelized(model: nn.Module, repository: Path, mode: kernels.Mode) -> type:
    """The class whose forward the model's layers may have got."""
    hub = kernels.LocalLayerRepository(repository, layer_name="SwiGLU")
    with kernels.use_kernel_mapping({"SwiGLU": {"cpu": hub}}, inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device="cpu", use_fallback=mode.name == "TRAINING")
    return hub.load()


def test_kernelize_swaps_the_mlps_of_models_for_inference(repository):
    torch.manual_seed(0)
    model, x = nn.Sequential(an_mlp()), torch.randn(3, 5, 16)
    with torch.no_grad():
        expected = model(x)
        layer = kernelized(model, repository, kernels.Mode.INFERENCE)
        assert model[0].forward.__func__ is layer.forward
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_an_mlp_in_training_keeps_its_own_forward(repository):
    """The op has no gradient."""
    model = nn.Sequential(an_mlp())
    layer = kernelized(model, repository, kernels.Mode.TRAINING)
    assert model[0].forward.__func__ is not layer.forward
    x = torch.randn(3, 16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.abs().sum() > 0
    assert model[0].gate_proj.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_an_mlp_with_another_activation_is_refused(repository):
    model = nn.Sequential(an_mlp("gelu"))
    kernelized(model, repository, kernels.Mode.INFERENCE)
    with pytest.raises(ValueError, match="MLP has the activation GELUActivation, not SiLU"):
        model(torch.randn(3, 16))
