"""What other libraries published of the same work: figures that stand beside predictions until a
device has measured both in one run."""

from __future__ import annotations

from dataclasses import dataclass

_LIGER = "github.com/linkedin/Liger-Kernel/pull/"


@dataclass(frozen=True)
class Published:
    """A peer's own figure.

    Args:
        peer: the library, and which of its implementations.
        figure: in words, of the shape named.
        shape: that it was measured on, and what was computed.
        device: as its source names it.
        source: where it stands.
        seconds: of the figure, where it is a time.
        bytes_per_second: where it is a rate, which applies to our shape as well.
    """

    peer: str
    figure: str
    shape: str
    device: str
    source: str
    seconds: float | None = None
    bytes_per_second: float | None = None


_QUACK_ROWS = Published(
    "quack",
    "3.0 TB/s",
    "cross entropy, softmax and RMSNorm of 8192 to 32768 rows of more than 4096",
    "H100",
    "github.com/Dao-AILab/quack, media/2025-07-10-membound-sol.md",
    bytes_per_second=3.0e12,
)

# By op, the closest to ours first; where a draw is cut, by op and what cuts it.
PUBLISHED: dict[str, tuple[Published, ...]] = {
    "token_logprobs": (_QUACK_ROWS,),
    "linear_logprobs": (
        Published(
            "Liger-Kernel, cuTile",
            "26.15 ms, 2432 MiB",
            "4096×4096×131072 bf16: NLL and entropy per token, both ways",
            "H100",
            _LIGER + "1359",
            seconds=26.15e-3,
        ),
        Published(
            "Liger-Kernel, CuTe",
            "27.74 ms; forward alone 6.05 ms (pull/1370)",
            "4096×4096×131072 bf16: NLL per token, both ways",
            "H100",
            _LIGER + "1359",
            seconds=27.74e-3,
        ),
    ),
    "linear_ppo_loss": (
        Published(
            "quack",
            "16.67 ms; forward alone 6.85 ms (pull/1348)",
            "4096×4096×128256 bf16: mean cross entropy, both ways, cold L2",
            "H200",
            _LIGER + "1356",
            seconds=16.67e-3,
        ),
        Published(
            "Liger-Kernel, CuTe",
            "16.62 ms; at sustained clocks 18.34 ms, cuTile 18.79 ms (pull/1369)",
            "4096×4096×128256 bf16: mean cross entropy, both ways, cold L2",
            "H200",
            _LIGER + "1356",
            seconds=16.62e-3,
        ),
        Published(
            "Liger-Kernel, CuTe",
            "762.8 TFLOP/s of backward's three products",
            "8192×4096×131072 bf16: scaled cross entropy, one GPU of the tensor-parallel form",
            "H200",
            _LIGER + "1422",
        ),
    ),
    "sample_tokens": (
        Published(
            "FlashSampling",
            "up to 1.25 times as fast as FlashInfer's fastest, the head's product included",
            "up to 64 rows of hidden states: no logits are written",
            "H100, H200, B200, B300",
            "arXiv:2603.15854",
        ),
    ),
    "sample_tokens top-k=50 top-p=0.9": (
        Published(
            "FlashInfer",
            "0.180 ms",
            "256×128000 bf16, k = 50, p = 0.9: the token alone",
            "B200",
            "github.com/flashinfer-ai/flashinfer/pull/3461",
            seconds=0.180e-3,
        ),
        Published(
            "Qrita, vLLM's default",
            "up to 1.4 times the serving throughput of SGLang's and FlashInfer's kernels",
            "top-k and top-p masks of logits",
            "as its paper says",
            "arXiv:2602.01518",
        ),
    ),
    "decode_attention": (
        Published(
            "FlashInfer",
            "0.555 ms, TileOPs 0.512 ms",
            "32 slots of 4096 tokens, 32/8 heads of 128, RoPE included",
            "H200 at 1500 MHz",
            "github.com/tile-ai/TileOPs/pull/2090",
            seconds=0.55456e-3,
        ),
    ),
    "rms_norm": (
        _QUACK_ROWS,
        Published(
            "Liger-Kernel",
            "49.5 µs",
            "2048×4096 fp32, residual added, forward",
            "H100",
            "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv (0.7.0)",
            seconds=49.5e-6,
        ),
    ),
}


def published(op: str, sampling: str = "") -> tuple[Published, ...]:
    """What is known of an op's peers; empty where none published a figure of such work."""
    return PUBLISHED.get(f"{op} {sampling}".strip(), ())
