"""Accelerators and links as their vendors publish them: dense, without sparsity; one direction of a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GB = 10**9


@dataclass(frozen=True)
class Sheet:
    """An accelerator as its vendor publishes it.

    Attributes:
        name: the product.
        source: where the figures are from.
        flops: TFLOP/s by dtype, dense. float32 is without TF32, as torch multiplies unless it is told
            otherwise.
        bandwidth: of memory, TB/s.
        capacity: bytes of memory.
        links: what joins it to others, by where they are: in the "host" and over the "network".
        marks: words of torch's name of the device that tell it from others; all must be in it.
    """

    name: str
    source: str
    flops: Mapping[str, float]
    bandwidth: float
    capacity: int
    links: Mapping[str, str]
    marks: tuple[str, ...]


@dataclass(frozen=True)
class LinkSheet:
    """A link as its vendor publishes it.

    Attributes:
        bandwidth: GB/s in one direction, per device.
        latency: seconds from a device to another, as a collective's step sees it.
        launch: seconds to start a collective.
    """

    name: str
    source: str
    bandwidth: float
    latency: float
    launch: float = 5e-6


#: Latencies are of NCCL's small-message steps: a few us over NVLink, 10 more through a NIC.
LINKS: Mapping[str, LinkSheet] = MappingProxyType(
    {
        "nvlink3": LinkSheet("NVLink 3", "NVIDIA A100 datasheet: 600 GB/s in both directions", 300, 3e-6),
        "nvlink4": LinkSheet("NVLink 4", "NVIDIA H100 datasheet: 900 GB/s in both directions", 450, 3e-6),
        "nvlink5": LinkSheet(
            "NVLink 5", "NVIDIA Blackwell datasheet: 1.8 TB/s in both directions", 900, 3e-6
        ),
        "pcie4": LinkSheet("PCIe 4 x16", "PCI-SIG: 16 GT/s x 16 lanes, 32 GB/s a direction", 32, 6e-6),
        "pcie5": LinkSheet("PCIe 5 x16", "PCI-SIG: 32 GT/s x 16 lanes, 64 GB/s a direction", 64, 6e-6),
        "infiniband-hdr": LinkSheet(
            "InfiniBand HDR", "NVIDIA DGX A100 datasheet: 200 Gb/s per GPU", 25, 12e-6
        ),
        "infiniband-ndr": LinkSheet(
            "InfiniBand NDR", "NVIDIA DGX H100 datasheet: 400 Gb/s per GPU", 50, 12e-6
        ),
        "infiniband-xdr": LinkSheet(
            "InfiniBand XDR", "NVIDIA Quantum-X800 datasheet: 800 Gb/s per port", 100, 12e-6
        ),
        "ethernet-100g": LinkSheet("100 Gb Ethernet", "IEEE 802.3: 100 Gb/s", 12.5, 3e-5),
    }
)

_A100 = {"float64": 9.7, "float32": 19.5, "bfloat16": 312, "float16": 312}
_H100 = {"float64": 34, "float32": 67, "bfloat16": 989, "float16": 989, "float8_e4m3fn": 1979}
_H100_PCIE = {"float64": 26, "float32": 51, "bfloat16": 756, "float16": 756, "float8_e4m3fn": 1513}
_B200 = {"float64": 37, "float32": 75, "bfloat16": 2250, "float16": 2250, "float8_e4m3fn": 4500}
_AMPERE, _HOPPER = "NVIDIA A100 datasheet, 2021", "NVIDIA H100 datasheet, 2023"

DEVICES: Mapping[str, Sheet] = MappingProxyType(
    {
        "a100-40gb": Sheet(
            "NVIDIA A100 SXM 40 GB", _AMPERE, _A100, 1.555, 40 * GB,
            {"host": "nvlink3", "network": "infiniband-hdr"}, ("A100", "40GB"),
        ),
        "a100": Sheet(
            "NVIDIA A100 SXM 80 GB", _AMPERE, _A100, 2.039, 80 * GB,
            {"host": "nvlink3", "network": "infiniband-hdr"}, ("A100",),
        ),
        "h100-pcie": Sheet(
            "NVIDIA H100 PCIe 80 GB", _HOPPER, _H100_PCIE, 2.0, 80 * GB,
            {"host": "pcie5", "network": "infiniband-ndr"}, ("H100", "PCIe"),
        ),
        "h100": Sheet(
            "NVIDIA H100 SXM 80 GB", _HOPPER, _H100, 3.35, 80 * GB,
            {"host": "nvlink4", "network": "infiniband-ndr"}, ("H100",),
        ),
        "h200": Sheet(
            "NVIDIA H200 SXM 141 GB", "NVIDIA H200 datasheet, 2024", _H100, 4.8, 141 * GB,
            {"host": "nvlink4", "network": "infiniband-ndr"}, ("H200",),
        ),
        "b200": Sheet(
            "NVIDIA B200 SXM 180 GB", "NVIDIA HGX B200 datasheet, 2025", _B200, 7.7, 180 * GB,
            {"host": "nvlink5", "network": "infiniband-ndr"}, ("B200",),
        ),
    }
)  # fmt: skip
